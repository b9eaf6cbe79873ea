"""The schedulers as a gateway sees them: every live replica's view of the mesh, and leases at the owner.

Keeps one WatchLoad stream to every replica behind the configured targets; a replica is live while its stream speaks.
The owner of (model, pool) is chosen by rendezvous hash over the live replicas, so that one queue holds one pool's
order; the others are warm standbys.
"""

import asyncio
import logging
from collections.abc import Coroutine

import grpc

from mesh.client import Backoff, connect
from mesh.clients.lease import Lease, LeaseLimits
from mesh.clients.load import ReplicaView, replica_view
from mesh.clients.placement import Demand
from mesh.clients.worker import Metadata
from mesh.discovery import at_each, owner
from mesh.tls import SCHEDULER, Tls
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

# MeshLoad comes at least each second; this much silence means that the replica is gone or stuck.
SILENT_S = 5.0

log = logging.getLogger("shoal.schedulers")


class Schedulers:
    """All replicas behind `targets`. Works while `run` runs; give that to the process's TaskGroup."""

    def __init__(self, targets: str, tls: Tls | None = None) -> None:
        self._targets = targets
        self._tls = tls
        self._stubs: dict[str, scheduler_pb2_grpc.SchedulerServiceAsyncStub] = {}
        self._replicas: dict[str, ReplicaView] = {}
        self._missed: set[str] = set()  # addresses whose absence has been told since they last answered
        self._change = asyncio.Event()
        self.version = 0  # grows whenever `replicas` changes
        self._group: asyncio.TaskGroup | None = None

    @property
    def replicas(self) -> tuple[ReplicaView, ...]:
        """The last word of each live replica."""
        return tuple(self._replicas.values())

    async def changed(self) -> None:
        """Wait until a replica came, went or pushed a new view."""
        await self._change.wait()

    async def run(self) -> None:
        """Follow every replica until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            await at_each(self._targets, self._watch, "watch")

    def owner(self, model: str, pool: str = "", *, shun: frozenset[str] = frozenset()) -> str | None:
        """The live replica that owns (model, pool), those in `shun` only if there is no other; None = none lives.

        A replica that came just now owns nothing yet while another can do the work: workers have to find it first.
        """
        live = [view for view in self._replicas.values() if not view.draining]
        live = [view for view in live if view.address not in shun] or live
        able = [view for view in live if view.settled and view.serves(model)]
        return owner(f"{model}/{pool}", [view.address for view in able or live])

    def stub(self, address: str) -> "scheduler_pb2_grpc.SchedulerServiceAsyncStub | None":
        """For leases: the replica's stub, None once it has left the targets."""
        return self._stubs.get(address)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """For leases: run `work` in the background, ended with `run`."""
        if self._group is None:
            raise RuntimeError("Schedulers.run is not running")
        return self._group.create_task(work)

    def lease(self, demand: Demand, limits: LeaseLimits, metadata: Metadata = ()) -> Lease:
        """A lease for one request; nothing is sent before `Lease.open`."""
        return Lease(self, demand, limits, metadata)

    async def _watch(self, address: str) -> None:
        backoff = Backoff()
        while True:
            # A channel of its own for each try: leases on a replica that fell silent end with it and go elsewhere.
            async with connect(address, self._tls, SCHEDULER) as channel:
                stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                self._stubs[address] = stub
                try:
                    await self._follow(address, stub, backoff)
                finally:
                    del self._stubs[address]
                    self._forget(address)
            await asyncio.sleep(backoff.next_s())

    async def _follow(
        self, address: str, stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub", backoff: Backoff
    ) -> None:
        """Take views until the stream ends or falls silent."""
        call = stub.WatchLoad(scheduler_pb2.WatchLoadRequest())
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    load = await call.read()
                if not isinstance(load, scheduler_pb2.MeshLoad):
                    return
                backoff.reset()
                self._missed.discard(address)
                self._replicas[address] = replica_view(address, load)
                self._announce()
        except grpc.aio.AioRpcError as error:
            log.log(self._level(address), "scheduler %s does not answer: %s", address, error.details())
        except TimeoutError:
            log.warning("scheduler %s has been silent for %.0f s", address, SILENT_S)
        finally:
            call.cancel()

    def _level(self, address: str) -> int:
        """An absence is told once, and again when it was there in between."""
        known = address in self._missed
        self._missed.add(address)
        return logging.DEBUG if known else logging.WARNING

    def _forget(self, address: str) -> None:
        if self._replicas.pop(address, None) is not None:
            self._announce()

    def _announce(self) -> None:
        self.version += 1
        change, self._change = self._change, asyncio.Event()
        change.set()
