"""Factories for what the scheduler's policies take, and one real server with workers and gateways that are clients."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from mesh.client import connect
from mesh.errors import ShoalError
from mesh.server import Server
from scheduler.absence import AbsencePolicy
from scheduler.breaker import BreakerPolicy
from scheduler.demand import Demand, Pins
from scheduler.dispatcher import Dispatcher, Policies
from scheduler.effects import Ended, Granted
from scheduler.leases import Open
from scheduler.metrics import Metrics
from scheduler.reports import Hello, Load
from scheduler.service import SchedulerService
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.scheduler.v1 import scheduler_pb2_grpc as rpc
from shoal.types.v1 import types_pb2 as types

MODEL = "tiny"
PINS = Pins(model=MODEL, tokenizer_digest=b"t")
GEOMETRY = pb.Geometry(block_tokens=16, layers=2, kv_heads=2, head_dim=8, kv_dtype="fp32")
DEADLINE_S = 10.0


class Make:
    """Inputs with sensible values; name only what a test is about."""

    pins = PINS

    def demand(self, request_id: str = "r1", pins: Pins = PINS, **given: Any) -> Demand:
        values = {"tenant": "a", "prompt_tokens": 32, "max_tokens": 32, "expected_tokens": 32} | given
        return Demand(request_id=request_id, pins=pins, **values)

    def hello(self, worker_id: str = "w1", pins: Pins = PINS, **given: Any) -> Hello:
        values = {"address": f"{worker_id}:1", "context_tokens": 2048, "total_blocks": 256, "max_sequences": 8} | given
        return Hello(worker_id=worker_id, pins=pins, **values)

    def load(self, seq: int = 1, **given: Any) -> Load:
        return Load(**({"seq": seq, "snapshot": seq == 1, "prefill_tokens_per_s": 1_000.0} | given))

    def dispatcher(self, **given: Any) -> Dispatcher:
        """Started at 0 s, settled at once."""
        return Dispatcher(Policies(**({"absence": AbsencePolicy(settle_s=0)} | given)), now=0.0)

    def bench(self, **policies: Any) -> "Bench":
        """A dispatcher of those policies on a bench of its own."""
        return Bench(self, **policies)


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()


class Bench:
    """A dispatcher, its workers and its time."""

    def __init__(self, make, **policies) -> None:
        self.make = make
        self.now = 0.0
        self.dispatcher = make.dispatcher(**policies)
        self._connections = itertools.count(100)
        self._seq: Counter[int] = Counter()
        self._leases = itertools.count(1)

    def attach(self, worker_id: str = "w1", load: dict | None = None, **hello) -> int:
        connection = next(self._connections)
        self.dispatcher.attach(connection, self.make.hello(worker_id, **hello), self.now)
        self.report(connection, **(load or {}))
        return connection

    def report(self, connection: int, *running: tuple[str, int], **load):
        self._seq[connection] += 1
        given = {"running": frozenset(running), "sequences": len(running)} | load
        return self.dispatcher.load(connection, self.make.load(self._seq[connection], **given), self.now)

    def open(self, request_id: str = "r1", opening: dict | None = None, **demand):
        """Lease number and effects."""
        lease = next(self._leases)
        event = Open(self.make.demand(request_id, **demand), **(opening or {}))
        return lease, self.dispatcher.handle(lease, event, self.now)

    def send(self, lease: int, event):
        return self.dispatcher.handle(lease, event, self.now)

    def tick(self, after_s: float = 0.0):
        self.now += after_s
        return self.dispatcher.tick(self.now)

    @staticmethod
    def grants(effects) -> list[tuple[str, int]]:
        """Worker and attempt of each grant."""
        return [(e.worker_id, e.attempt) for e in effects if isinstance(e, Granted)]

    @staticmethod
    def errors(effects) -> list[ShoalError | None]:
        """How leases ended."""
        return [e.error for e in effects if isinstance(e, Ended)]

    def charges(self) -> int:
        return len(self.dispatcher.fleet.ledger)


@pytest.fixture
def bench(make: Make) -> Bench:
    return make.bench()


# ---- one real server ----------------------------------------------------------------


class FakeWorker:
    """A real client of Attach. `orders` are those it has read; `ended` its stream's last status."""

    def __init__(self, stub: Any, hello: pb.Hello) -> None:
        self.hello = hello
        self.orders: list[pb.WorkerOrder] = []
        self.ended: grpc.StatusCode | None = None
        self.details = ""
        self._call = stub.Attach()
        self._seq = itertools.count(1)
        self._answered = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for order in self._call:
                self.orders.append(order)
                self._answered.set()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended = await self._call.code()
            self.details = await self._call.details()
            self._answered.set()

    async def attach(self, **load: Any) -> "FakeWorker":
        """Say hello and, unless it is refused, report. (A report that meets the refusal on its way would replace its
        status by gRPC's own INTERNAL.)
        """
        await self._call.write(pb.WorkerReport(hello=self.hello))
        await self._answered.wait()
        if self.ended is None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.report(**({"snapshot": True} | load))
        return self

    async def report(self, running: tuple[tuple[str, int], ...] = (), **load: Any) -> None:
        values = {"seq": next(self._seq), "free_blocks": self.hello.total_blocks, "healthy": True}
        values |= {"prefill_tokens_per_s": 1_000} | load
        runs = [pb.Running(request_id=request_id, attempt=attempt) for request_id, attempt in running]
        await self._call.write(pb.WorkerReport(load=pb.Load(running=runs, **values)))

    def skip_a_report(self) -> None:
        next(self._seq)

    def got(self, kind: str) -> list[Any]:
        return [getattr(order, kind) for order in self.orders if order.WhichOneof("order") == kind]

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reading])


class FakeGateway:
    """A real client of Acquire: one lease."""

    def __init__(self, stub: Any, first: pb.LeaseEvent) -> None:
        self._call = stub.Acquire(timeout=DEADLINE_S)
        self.first = first

    async def send(self, **event: Any) -> "FakeGateway":
        await self._call.write(pb.LeaseEvent(**event) if event else self.first)
        return self

    async def grant(self) -> pb.Grant:
        grant = await self._call.read()
        assert isinstance(grant, pb.Grant), f"the lease ended: {await self._call.code()}"
        return grant

    async def end(self) -> grpc.aio.AioRpcError | None:
        """The error that the lease ends with; None if it ended well."""
        try:
            message = await self._call.read()
            assert message is grpc.aio.EOF, f"a grant instead of the end: {message}"
        except grpc.aio.AioRpcError as error:
            return error
        return None

    async def half_close(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@dataclass
class Mesh:
    """The server under test and what talks to it."""

    service: SchedulerService
    dispatcher: Dispatcher
    registry: CollectorRegistry
    server: Server
    stub: Any
    eventually: Any
    _workers: list[FakeWorker] = field(default_factory=list)
    _leases: list[FakeGateway] = field(default_factory=list)

    async def worker(self, worker_id: str = "w1", load: dict[str, Any] | None = None, **hello: Any) -> FakeWorker:
        """A worker whose first report the replica has taken."""
        worker = await self.stranger(worker_id, load, **hello)
        await self.eventually(lambda: worker.got("welcome"), every_s=0.005)
        await self.eventually(lambda: self.dispatcher.fleet.workers.get(worker_id).seq, every_s=0.005)
        return worker

    async def stranger(self, worker_id: str = "w1", load: dict[str, Any] | None = None, **hello: Any) -> FakeWorker:
        """A worker that has said hello and reported; the replica may not take it."""
        values = {
            "address": f"{worker_id}:1",
            "model": MODEL,
            "tokenizer_digest": b"t",
            "context_tokens": 2048,
            "total_blocks": 256,
            "max_sequences": 8,
            "block_format_version": 1,
            "geometry": GEOMETRY,
        } | hello
        worker = FakeWorker(self.stub, pb.Hello(worker_id=worker_id, **values))
        self._workers.append(worker)
        return await worker.attach(**(load or {}))

    def demand(self, request_id: str = "r1", **given: Any) -> pb.Demand:
        meta = types.RequestMeta(request_id=request_id, tenant="a", model=given.pop("model", MODEL))
        values = {"prompt_tokens": 32, "max_tokens": 32, "choices": 1, "tokenizer_digest": b"t"} | given
        return pb.Demand(meta=meta, **values)

    async def open(self, request_id: str = "r1", **given: Any) -> FakeGateway:
        """A lease that has sent Open; Open's own fields may be named beside the demand's."""
        own = {name: given.pop(name) for name in ("waited_ms", "avoid", "last_attempt") if name in given}
        opening = pb.Open(demand=self.demand(request_id, **given), **own)
        return await self.lease(pb.LeaseEvent(open=opening))

    async def lease(self, first: pb.LeaseEvent) -> FakeGateway:
        lease = FakeGateway(self.stub, first)
        self._leases.append(lease)
        return await lease.send()

    async def close(self) -> None:
        for lease in self._leases:
            lease.cancel()
        for worker in self._workers:
            await worker.close()

    def waiting(self) -> int:
        return sum(stat.waiting for stat in self.dispatcher.queues(0.0))

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"shoal_scheduler_{name}", labels)


FAST = Policies(
    absence=AbsencePolicy(settle_s=0, no_worker_grace_s=0.3),
    breaker=BreakerPolicy(failures=2, open_s=0.3),
    unclaimed_after_s=0.3,
)


@asynccontextmanager
async def _mesh(
    eventually: Any, policies: Policies, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> AsyncIterator[Mesh]:
    registry = CollectorRegistry()
    loop = asyncio.get_running_loop()
    dispatcher = Dispatcher(policies, loop.time())
    service = SchedulerService(dispatcher, Metrics(registry), "s1", loop.time)
    services = {"shoal.scheduler.v1.SchedulerService": partial(rpc.add_SchedulerServiceServicer_to_server, service)}
    server = Server(services, interceptors)
    port = await server.start("127.0.0.1", 0)
    ticking = asyncio.ensure_future(service.run(0.02))
    async with connect(f"127.0.0.1:{port}") as channel:
        mesh = Mesh(service, dispatcher, registry, server, rpc.SchedulerServiceStub(channel), eventually)
        yield mesh
        await mesh.close()
        await service.drain(2)
        await server.drain(2)
    assert not ticking.done(), "the tick broke"
    ticking.cancel()


@pytest_asyncio.fixture
async def mesh(eventually: Any) -> AsyncIterator[Mesh]:
    async with _mesh(eventually, FAST) as mesh:
        yield mesh


@pytest.fixture
def mesh_with(eventually: Any) -> Callable[..., Any]:
    """`async with mesh_with(queue=QueuePolicy(...)) as mesh`: other policies than the usual ones."""
    return lambda interceptors=(), **given: _mesh(eventually, replace(FAST, **given), interceptors)
