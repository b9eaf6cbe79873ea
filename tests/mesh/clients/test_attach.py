"""The worker's side of Attach against schedulers that record what they hear, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from mesh.clients.attach import Attached, Attacher
from mesh.clients.board import Board
from mesh.clients.reports import LoadState, WorkerFacts
from mesh.errors import Superseded, errors_as_status
from shoal.channel import server_options
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

FACTS = WorkerFacts(
    worker_id="w-1", address="127.0.0.1:7", model="tiny", pool="default", model_digest=b"m", tokenizer_digest=b"t",
    block_tokens=16, layers=2, kv_heads=2, head_dim=8, kv_dtype="fp32", context_tokens=512, total_blocks=100,
    max_sequences=8, precision="fp32", version="1", block_format_version=1, features=("seed",), fault_domain="here",
)  # fmt: skip


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Records each Attach apart; `order` sends to the newest. `rude` = never says Welcome."""

    def __init__(self, rude: bool = False) -> None:
        self.attaches: list[list[scheduler_pb2.WorkerReport]] = []
        self.arrivals: list[float] = []
        self._orders: asyncio.Queue[scheduler_pb2.WorkerOrder] = asyncio.Queue(16)
        self._rude = rude

    async def Attach(self, reports: Any, context: Any) -> AsyncIterator[scheduler_pb2.WorkerOrder]:
        heard: list[scheduler_pb2.WorkerReport] = []
        self.attaches.append(heard)
        if self._rude:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not today")
        async for report in reports:
            heard.append(report)
            self.arrivals.append(asyncio.get_running_loop().time())
            if report.HasField("hello"):
                yield scheduler_pb2.WorkerOrder(welcome=scheduler_pb2.Welcome(scheduler_id="s"))
            while not self._orders.empty():
                yield self._orders.get_nowait()

    def order(self, **order: Any) -> None:
        self._orders.put_nowait(scheduler_pb2.WorkerOrder(**order))

    @property
    def loads(self) -> list[scheduler_pb2.Load]:
        return [report.load for report in self.attaches[-1][1:]] if self.attaches else []


@asynccontextmanager
async def listening(scheduler: Scheduler, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server(options=server_options())
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Worker:
    """A worker's state without an engine."""

    def __init__(self) -> None:
        self.board = Board()
        self.running: frozenset[tuple[str, int]] = frozenset()
        self.draining = False
        self.parked: list[tuple[str, int]] = []

    def attached(self) -> Attached:
        return Attached(FACTS, self.board, self.load, lambda id_, attempt, reason: self.parked.append((id_, attempt)))

    def load(self) -> LoadState:
        return LoadState(running=self.running, draining=self.draining, healthy=True, free_blocks=100)


@asynccontextmanager
async def attaching(worker: Worker, *addresses: str) -> AsyncIterator[Attacher]:
    attacher = Attacher(worker.attached(), ",".join(addresses))
    task = asyncio.ensure_future(attacher.run())
    try:
        yield attacher
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_hello_comes_first_then_loads_from_one_on_at_least_each_second(eventually: Any) -> None:
    scheduler, worker = Scheduler(), Worker()
    async with listening(scheduler) as address, attaching(worker, address):
        await eventually(lambda: len(scheduler.loads) >= 3, timeout_s=5)
    first = scheduler.attaches[0][0]
    assert first.hello.worker_id == "w-1"
    assert first.hello.geometry.head_dim == 8
    assert [load.seq for load in scheduler.loads[:3]] == [1, 2, 3]
    assert scheduler.loads[0].snapshot


async def test_changes_are_told_at_once_but_no_more_often_than_stated(eventually: Any) -> None:
    scheduler, worker = Scheduler(), Worker()
    async with listening(scheduler) as address, attaching(worker, address):
        await eventually(lambda: scheduler.loads)
        began, before = asyncio.get_running_loop().time(), len(scheduler.loads)
        for number in range(200):
            worker.board.note([key(number)], [])
            await asyncio.sleep(0)
        await eventually(lambda: sum(len(b.stored) for load in scheduler.loads for b in load.blocks) == 200 * 16)
        took = asyncio.get_running_loop().time() - began
    assert len(scheduler.loads) - before <= took / 0.05 + 1


async def test_running_ids_and_draining_are_told(eventually: Any) -> None:
    scheduler, worker = Scheduler(), Worker()
    async with listening(scheduler) as address, attaching(worker, address):
        await eventually(lambda: scheduler.loads)
        worker.running, worker.draining = frozenset({("r", 2)}), True
        worker.board.touch()
        await eventually(lambda: scheduler.loads[-1].draining, timeout_s=0.5)
    assert list(scheduler.loads[-1].running) == [scheduler_pb2.Running(request_id="r", attempt=2)]


async def test_a_snapshot_follows_an_order_and_deltas_follow_the_snapshot(eventually: Any) -> None:
    scheduler, worker = Scheduler(), Worker()
    worker.board.note([key(1), key(2)], [])
    async with listening(scheduler) as address, attaching(worker, address):
        await eventually(lambda: scheduler.loads)
        scheduler.order(send_snapshot=scheduler_pb2.SendSnapshot())
        await eventually(lambda: sum(load.snapshot for load in scheduler.loads) == 2, timeout_s=5)
        snapshot = [load for load in scheduler.loads if load.snapshot][-1]
        worker.board.note([], [key(1)])
        await eventually(lambda: any(blocks.evicted for load in scheduler.loads for blocks in load.blocks))
        delta = next(load for load in scheduler.loads for blocks in load.blocks if blocks.evicted)
    assert {snapshot.blocks[0].stored[at : at + 16] for at in (0, 16)} == {key(1), key(2)}
    assert delta.blocks[0].evicted == key(1)
    assert delta.seq > snapshot.seq
    assert not delta.snapshot


async def test_a_scheduler_that_comes_back_hears_hello_and_everything_again(eventually: Any) -> None:
    scheduler, worker = Scheduler(), Worker()
    worker.board.note([key(1)], [])
    async with AsyncExitStack() as stack:
        async with listening(scheduler) as address:
            attacher = await stack.enter_async_context(attaching(worker, address))
            await eventually(lambda: scheduler.loads and attacher.replicas)
            epoch = scheduler.loads[-1].attach_epoch
        await eventually(lambda: not attacher.replicas)
        async with listening(scheduler, address):
            await eventually(lambda: len(scheduler.attaches) == 2 and scheduler.loads, timeout_s=8)
            assert scheduler.attaches[1][0].HasField("hello")
            assert scheduler.loads[0].seq == 1
            assert scheduler.loads[0].snapshot
            assert scheduler.loads[0].blocks[0].stored == key(1)
            await eventually(lambda: scheduler.loads[-1].attach_epoch >= epoch + 2)


async def test_every_replica_has_numbers_of_its_own_and_one_being_away_bothers_no_other(eventually: Any) -> None:
    schedulers, worker = [Scheduler(), Scheduler(rude=True), Scheduler()], Worker()
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(listening(scheduler)) for scheduler in schedulers]
        attacher = await stack.enter_async_context(attaching(worker, *addresses, "127.0.0.1:1"))
        await eventually(lambda: len(schedulers[1].attaches) >= 2)
        await eventually(lambda: attacher.replicas == {addresses[0], addresses[2]})
        for scheduler in (schedulers[0], schedulers[2]):
            await eventually(lambda scheduler=scheduler: len(scheduler.loads) >= 2, timeout_s=5)
            assert [load.seq for load in scheduler.loads[:2]] == [1, 2]
            assert len(scheduler.attaches) == 1


class JealousScheduler(Scheduler):
    """Keeps the newest attachment of a worker and supersedes the one before, as schedulers do."""

    async def Attach(self, reports: Any, context: Any) -> AsyncIterator[scheduler_pb2.WorkerOrder]:
        heard: list[scheduler_pb2.WorkerReport] = []
        self.attaches.append(heard)
        async with errors_as_status(context):
            async for report in reports:
                if self.attaches[-1] is not heard:
                    raise Superseded("the worker has attached again")
                heard.append(report)
                if report.HasField("hello"):
                    yield scheduler_pb2.WorkerOrder(welcome=scheduler_pb2.Welcome(scheduler_id="one"))


async def test_a_scheduler_under_two_addresses_is_left_one_attachment_and_the_other_follows_its_loss(
    eventually: Any,
) -> None:
    scheduler, worker = JealousScheduler(), Worker()

    def lasts(loads: int) -> bool:
        worker.board.touch()
        return len(scheduler.loads) >= loads

    async with AsyncExitStack() as stack:
        servers = [AsyncExitStack(), AsyncExitStack()]
        closing = {await server.enter_async_context(listening(scheduler)): server for server in servers}
        for server in servers:
            stack.push_async_callback(server.aclose)
        attacher = await stack.enter_async_context(attaching(worker, *closing))
        await eventually(lambda: len(scheduler.attaches) >= 2)
        await eventually(lambda: lasts(15), timeout_s=8)
        settled = len(scheduler.attaches)
        assert settled <= 3  # one may be superseded before it learnt whom it was attached to, and asks once more
        await eventually(lambda: lasts(45), timeout_s=8)
        assert len(scheduler.attaches) == settled
        (kept,) = attacher.replicas
        await closing.pop(kept).aclose()
        await eventually(lambda: attacher.replicas == set(closing), timeout_s=8)


async def test_a_stop_order_parks_its_attempt(eventually: Any) -> None:
    scheduler, worker = Scheduler(), Worker()
    async with listening(scheduler) as address, attaching(worker, address):
        await eventually(lambda: scheduler.loads)
        scheduler.order(stop=scheduler_pb2.Stop(request_id="r", attempt=2, reason="move"))
        await eventually(lambda: worker.parked == [("r", 2)])


async def test_an_attempt_is_parked_when_all_replicas_of_one_epoch_leave_it_unclaimed(eventually: Any) -> None:
    schedulers, worker = [Scheduler(), Scheduler()], Worker()
    stray = scheduler_pb2.Running(request_id="stray", attempt=1)
    claimed = scheduler_pb2.Running(request_id="claimed", attempt=1)
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(listening(scheduler)) for scheduler in schedulers]
        attacher = await stack.enter_async_context(attaching(worker, *addresses))
        await eventually(lambda: len(attacher.replicas) == 2)
        await eventually(lambda: all(s.loads and s.loads[-1].attach_epoch == 2 for s in schedulers))
        for scheduler in schedulers:  # of an epoch that is over
            scheduler.order(unclaimed=scheduler_pb2.Unclaimed(attach_epoch=1, attempts=[claimed]))
        schedulers[0].order(unclaimed=scheduler_pb2.Unclaimed(attach_epoch=2, attempts=[stray, claimed]))
        schedulers[1].order(unclaimed=scheduler_pb2.Unclaimed(attach_epoch=2, attempts=[stray]))
        worker.board.touch()
        await eventually(lambda: worker.parked == [("stray", 1)])
