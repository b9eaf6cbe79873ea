"""A gateway between peers that play scheduler and worker by script, over real gRPC on loopback.

A script is an async generator of what a worker says to one Generate; `says` makes the common ones. The gateway is the
real one: real servers, real tokenizer, real channels.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

from gateway.prompt.text_model import TextModel
from gateway.service import Gateway, running
from gateway.settings import GatewaySettings
from mesh import models
from mesh.errors import ShoalError, Unavailable, errors_as_status
from mesh.server import Server
from mesh.telemetry import Telemetry
from shoal.scheduler.v1 import scheduler_pb2 as sched
from shoal.scheduler.v1 import scheduler_pb2_grpc
from shoal.types.v1 import types_pb2 as types
from shoal.worker.v1 import worker_pb2 as work
from shoal.worker.v1 import worker_pb2_grpc

MODEL = models.DEFAULT_MODEL
Script = Callable[["ScriptedWorker", work.GenerateRequest, Any], AsyncIterator[work.GenerateResponse]]


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return TextModel.load(models.find(MODEL))


@pytest.fixture(scope="session")
def ids_of(text_model: TextModel) -> Callable[[str], list[int]]:
    """The token ids of a text, as a worker would emit them."""
    return lambda text: list(text_model.vocabulary.full.encode(text, add_special_tokens=False).ids)


def accepted(cached: int = 0) -> work.GenerateResponse:
    tiers = [types.CachedTokens(tier=types.KV_TIER_DEVICE, tokens=cached)] if cached else []
    return work.GenerateResponse(accepted=work.Accepted(cached=tiers, precision="fp32", model_digest=b"weights"))


def tokens(choice: int, position: int, ids: Sequence[int], logprobs: int | None = None) -> work.GenerateResponse:
    message = work.Tokens(choice=choice, position=position, ids=ids)
    if logprobs is not None:
        for token in ids:
            top = [types.TokenLogprob(token_id=token, logprob=-0.5)] * logprobs
            message.logprobs.append(types.TokenLogprob(token_id=token, logprob=-0.5, top=top))
    return work.GenerateResponse(tokens=message)


def finished(
    request: work.GenerateRequest, choice: int, count: int, reason: int = types.FINISH_REASON_STOP, message: str = ""
) -> work.GenerateResponse:
    usage = types.Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=count, precision="fp32")
    return work.GenerateResponse(
        finished=work.Finished(choice=choice, reason=reason, completion_tokens=count, usage=usage, message=message)
    )


def says(
    *answers: Sequence[int],
    batch: int = 1,
    reason: int = types.FINISH_REASON_STOP,
    cached: int = 0,
    stop_token: int = 0,
) -> Script:
    """Emits answers[choice] after what is emitted already. `stop_token` 1 = a counted stop token ends each."""

    async def script(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        logprobs = request.sampling.top_logprobs if request.sampling.HasField("top_logprobs") else None
        yield accepted(cached)
        left = {choice.index: len(choice.emitted_ids) for choice in request.choices}
        while left:
            for choice, position in list(left.items()):
                answer = answers[choice][: request.sampling.max_tokens]
                keep = worker.stopped(request, choice)
                if keep is not None:
                    del left[choice]
                    yield finished(request, choice, keep)
                elif position < len(answer):
                    ids = answer[position : position + batch]
                    left[choice] += len(ids)
                    yield tokens(choice, position, ids, logprobs)
                else:
                    del left[choice]
                    cut = len(answers[choice]) > len(answer)
                    yield finished(
                        request, choice, len(answer) + stop_token, types.FINISH_REASON_LENGTH if cut else reason
                    )
            await asyncio.sleep(0)

    return script


def first(count: int, script: Script, then: Script) -> Script:
    """The first `count` responses of `script`, then all of `then`."""

    async def both(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async for response in script(worker, request, context):
            if count_left[0] == 0:
                break
            count_left[0] -= 1
            yield response
        async for response in then(worker, request, context):
            yield response

    count_left = [count]
    return both


async def hangs(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Says nothing more, for ever."""
    await asyncio.Event().wait()
    yield accepted()


async def progresses(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Works on for ever and has nothing to show."""
    while True:
        await asyncio.sleep(0.1)
        yield work.GenerateResponse(progress=work.Progress(engine_steps=1, median_step_ms=5))


async def resets(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Ends as a killed process does: UNAVAILABLE from the transport."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    yield accepted()


def raises(error: ShoalError) -> Script:
    """Refuses or fails as our own services do."""

    async def script(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async with errors_as_status(context):
            raise error
        yield accepted()

    return script


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


@dataclass
class ScriptedMesh:
    """What a test holds: the peers, the gateway, and an HTTP client for it."""

    scheduler: ScriptedScheduler
    workers: list[ScriptedWorker]
    stack: AsyncExitStack
    text_model: TextModel
    gateways: list[Gateway] = field(default_factory=list)

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    async def add_worker(self, *scripts: Script) -> ScriptedWorker:
        worker = ScriptedWorker(f"w{len(self.workers) + 1}")
        worker.scripts = list(scripts) or worker.scripts
        await worker.start()
        self.stack.push_async_callback(worker.kill)
        self.workers.append(worker)
        self.scheduler.workers.append(worker)
        self.scheduler.changed()
        return worker

    async def start_gateway(self, **given: Any) -> Gateway:
        """A gateway that has heard of every worker by the time this returns."""
        gateway = await self.stack.enter_async_context(serving(self.scheduler.address, self.text_model, **given))
        self.gateways.append(gateway)
        return gateway

    def http(self, gateway: Gateway | None = None) -> httpx.AsyncClient:
        base = f"http://127.0.0.1:{(gateway or self.gateway).http_port}"
        return httpx.AsyncClient(base_url=base, timeout=20, trust_env=False)


@asynccontextmanager
async def serving(schedulers: str, text_model: TextModel, **given: Any) -> AsyncIterator[Gateway]:
    """A real gateway on free ports."""
    ports = {"http_port": 0, "grpc_port": 0, "log_level": "error", "log_format": "text", "drain_s": 5}
    settings = GatewaySettings.load(**{**ports, "schedulers": schedulers, "model": MODEL, **given})
    telemetry = Telemetry(settings, instance="test")
    async with running(settings, telemetry, {MODEL: text_model}) as gateway:
        yield gateway


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Telemetry takes over the root logger; give it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def mesh(
    text_model: TextModel, logging_as_before: None, eventually: Callable[..., Any]
) -> AsyncIterator[ScriptedMesh]:
    """One scheduler, one worker and one gateway that is ready."""
    async with AsyncExitStack() as stack:
        scheduler = ScriptedScheduler(text_model.tokenizer_digest)
        await scheduler.start()
        stack.push_async_callback(scheduler.kill)
        scripted = ScriptedMesh(scheduler, [], stack, text_model)
        await scripted.add_worker()
        await scripted.start_gateway()
        await eventually(lambda: not scripted.gateway.missing)
        yield scripted


class Play:
    """The scripts, by name, for tests (a conftest cannot be imported)."""

    says = staticmethod(says)
    first = staticmethod(first)
    raises = staticmethod(raises)
    hangs = staticmethod(hangs)
    progresses = staticmethod(progresses)
    resets = staticmethod(resets)
    tokens = staticmethod(tokens)
    finished = staticmethod(finished)
    accepted = staticmethod(accepted)
    serving = staticmethod(serving)
    Scheduler = ScriptedScheduler


@pytest.fixture(scope="session")
def play() -> type[Play]:
    return Play


@dataclass
class Stream:
    """A read SSE body."""

    status: int
    headers: httpx.Headers
    lines: list[str]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    @property
    def done(self) -> bool:
        return [line for line in self.lines if line][-1] == "data: [DONE]"

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", []) if choice["index"] == index]

    def texts(self, index: int = 0) -> list[str]:
        return [text for c in self.choices(index) if (text := c.get("text") or c.get("delta", {}).get("content"))]

    def text(self, index: int = 0) -> str:
        return "".join(self.texts(index))

    def reason(self, index: int = 0) -> str | None:
        [reason] = [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"]]
        return reason

    @property
    def usage(self) -> dict[str, Any] | None:
        return self.chunks[-1].get("usage")

    @property
    def error(self) -> dict[str, Any] | None:
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)


@pytest.fixture
def ask(mesh: ScriptedMesh) -> Callable[..., Any]:
    """`await ask(stream=True, **body)`: a Stream, its lines told to `heard` as they come; or the response, read."""

    async def asked(
        path: str = "/v1/chat/completions",
        *,
        gateway: Gateway | None = None,
        heard: Callable[[str], object] = lambda _: None,
        **body: Any,
    ) -> Any:
        default = {"prompt": "Say"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Say"}]}
        async with mesh.http(gateway) as client:
            request = client.build_request("POST", path, json={"model": MODEL, **default, **body})
            response = await client.send(request, stream=True)
            if body.get("stream") and response.status_code == 200:
                stream = Stream(200, response.headers, [])
                async for line in response.aiter_lines():
                    stream.lines.append(line)
                    heard(line)
                return stream
            await response.aread()
            return response

    return asked
