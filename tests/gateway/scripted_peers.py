"""Peers that play scheduler and worker by script, over real gRPC on loopback."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from mesh import models
from mesh.errors import ShoalError, Unavailable, errors_as_status
from mesh.server import Server
from shoal.scheduler.v1 import scheduler_pb2 as sched
from shoal.scheduler.v1 import scheduler_pb2_grpc
from shoal.worker.v1 import worker_pb2 as work
from shoal.worker.v1 import worker_pb2_grpc

from .scripts import Script, says

MODEL = models.DEFAULT_MODEL


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Plays one script per Generate: `scripts` in order, the last one again and again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scripts: list[Script] = [says([])]
        self.requests: list[work.GenerateRequest] = []
        self.stops: list[work.StopChoicesRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.running = 0
        self.server = Server({"shoal.worker.v1.WorkerService": self._add})
        self.address = ""

    def _add(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    async def kill(self) -> None:
        """Every connection breaks; nobody listens any more."""
        await self.server._server.stop(None)

    def stopped(self, request: work.GenerateRequest, choice: int) -> int | None:
        for stop in self.stops:
            if stop.request_id == request.meta.request_id:
                for entry in stop.choices:
                    if entry.choice == choice:
                        return entry.keep_tokens
        return None

    async def Generate(self, request: work.GenerateRequest, context: Any) -> AsyncIterator[work.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.running += 1
        try:
            async for response in script(self, request, context):
                yield response
        finally:
            self.running -= 1

    async def StopChoices(self, request: work.StopChoicesRequest, context: Any) -> work.StopChoicesReply:
        self.stops.append(request)
        return work.StopChoicesReply()


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Grants the first worker that has not failed the request; `open_gate` holds the queue while cleared."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.workers: list[ScriptedWorker] = []
        self.settled = True
        self.healthy = True
        self.age_ms = 0
        self.context_tokens = 8192
        self.error: ShoalError | None = None
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.events: list[sched.LeaseEvent] = []
        self.metadata: list[dict[str, Any]] = []
        self.leases = 0
        self.watchers: set[asyncio.Event] = set()
        self.server = Server({"shoal.scheduler.v1.SchedulerService": self._add})
        self.address = ""

    def _add(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    async def start(self, port: int = 0) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', port)}"

    async def kill(self) -> None:
        await self.server._server.stop(None)

    def changed(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    def of_kind(self, kind: str) -> list[Any]:
        return [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[sched.MeshLoad]:
        change = asyncio.Event()
        self.watchers.add(change)
        try:
            while True:
                yield self._mesh_load()
                try:
                    async with asyncio.timeout(1):
                        await change.wait()
                except TimeoutError:
                    continue
                change.clear()
        finally:
            self.watchers.discard(change)

    def _mesh_load(self) -> sched.MeshLoad:
        states = [
            sched.WorkerState(
                hello=sched.Hello(
                    worker_id=worker.name,
                    address=worker.address,
                    model=MODEL,
                    model_digest=b"weights",
                    tokenizer_digest=self.digest,
                    context_tokens=self.context_tokens,
                ),
                load=sched.Load(healthy=self.healthy),
                age_ms=self.age_ms,
            )
            for worker in self.workers
        ]
        return sched.MeshLoad(scheduler_id="s1", workers=states, settled=self.settled)

    async def Acquire(self, events: AsyncIterator[sched.LeaseEvent], context: Any) -> AsyncIterator[sched.Grant]:
        self.leases += 1
        self.metadata.append(dict(context.invocation_metadata()))
        attempt, avoid = 0, set()
        try:
            async with errors_as_status(context):
                async for event in events:
                    self.events.append(event)
                    kind = event.WhichOneof("event")
                    if kind == "finished":
                        return
                    if kind == "adopt":
                        attempt = event.adopt.attempt
                        yield sched.Grant(worker=event.adopt.worker, attempt=attempt, adopted=True)
                        continue
                    if kind == "open":
                        attempt = event.open.last_attempt
                        avoid.update(event.open.avoid)
                    if kind == "failed":
                        avoid.add(event.failed.worker_id)
                    await self.open_gate.wait()
                    attempt += 1
                    yield self._grant(attempt, avoid)
        finally:
            self.leases -= 1

    def _grant(self, attempt: int, avoid: set[str]) -> sched.Grant:
        if self.error is not None:
            raise self.error
        able = [worker for worker in self.workers if worker.name not in avoid]
        if not able:
            raise Unavailable("no worker serves this model", code="no_worker", retry_after_s=2)
        worker = able[0]
        return sched.Grant(
            worker=sched.WorkerRef(worker_id=worker.name, address=worker.address),
            attempt=attempt,
            queue_class="normal/S",
            reason="least expected time",
            scheduler_id="s1",
        )
