"""The schedulers' client against real servers: who owns what, and leases that outlive their scheduler."""

import asyncio
import logging
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from mesh.clients.attempt import Meta
from mesh.clients.lease import Lease, LeaseLimits
from mesh.clients.outcomes import FailureKind, Outcome, RefusedCause
from mesh.clients.placement import Demand
from mesh.clients.scheduler import Schedulers
from mesh.clients.usage import Usage
from mesh.errors import DeadlineExceeded, Overloaded, ShoalError, Unavailable, errors_as_status
from mesh.server import Server
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.scheduler.v1 import scheduler_pb2_grpc


class Replica(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Grants each question at once, unless `queueing`."""

    def __init__(self) -> None:
        self.events: list[pb.LeaseEvent] = []
        self.draining = False
        self.settled = True
        self.models: list[str] = []  # of attached workers
        self.queueing = False
        self.error: ShoalError | None = None
        self.leases = 0
        self._changes: set[asyncio.Event] = set()
        self._server = Server({"shoal.scheduler.v1.SchedulerService": self._add})
        self.address = ""

    def _add(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', 0)}"

    async def kill(self) -> None:
        await self._server._server.stop(None)

    async def leave(self) -> None:
        """Take no more calls and no connections; those that run may go on."""
        await self._server._server.stop(30)

    def kinds(self) -> list[str]:
        return [str(event.WhichOneof("event")) for event in self.events]

    def drain(self) -> None:
        self.draining = True
        self.tell()

    def tell(self) -> None:
        for change in self._changes:
            change.set()

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[pb.MeshLoad]:
        change = asyncio.Event()
        self._changes.add(change)
        while True:
            change.clear()
            workers = [pb.WorkerState(hello=pb.Hello(model=m), load=pb.Load(healthy=True)) for m in self.models]
            yield pb.MeshLoad(scheduler_id=self.address, draining=self.draining, settled=self.settled, workers=workers)
            if self.draining:
                return
            await change.wait()

    async def Acquire(self, events: AsyncIterator[pb.LeaseEvent], context: Any) -> AsyncIterator[pb.Grant]:
        self.leases += 1
        attempt = 0
        try:
            async with errors_as_status(context):
                async for event in events:
                    self.events.append(event)
                    kind = event.WhichOneof("event")
                    if self.error is not None:
                        raise self.error
                    if kind == "finished":
                        return
                    if self.queueing:
                        await asyncio.Event().wait()
                    attempt = max(attempt, event.open.last_attempt, event.adopt.attempt - 1) + 1
                    worker = pb.WorkerRef(worker_id=f"w{attempt}", address="127.0.0.1:1")
                    yield pb.Grant(worker=worker, attempt=attempt, adopted=kind == "adopt")
        finally:
            self.leases -= 1


@asynccontextmanager
async def connected(*replicas: Replica) -> AsyncIterator[Schedulers]:
    """Schedulers that have heard of every replica."""
    schedulers = Schedulers(",".join(replica.address for replica in replicas))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(schedulers.run())
        while len(schedulers.replicas) < len(replicas):
            await schedulers.changed()
        yield schedulers
        running.cancel()


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    made = [Replica() for _ in range(3)]
    for replica in made:
        await replica.start()
    yield made
    for replica in made:
        await replica.kill()


async def test_a_scheduler_that_does_not_answer_is_told_once_with_the_reason(
    caplog: pytest.LogCaptureFixture, eventually: Callable[..., Awaitable[object]]
) -> None:
    def tries() -> list[int]:
        return [record.levelno for record in caplog.records if "127.0.0.1:1 does not answer: " in record.message]

    caplog.set_level(logging.DEBUG, "shoal.schedulers")
    running = asyncio.ensure_future(Schedulers("127.0.0.1:1").run())
    await eventually(lambda: len(tries()) >= 3)
    running.cancel()
    assert tries()[:3] == [logging.WARNING, logging.DEBUG, logging.DEBUG]


def demand(model: str = "m") -> Demand:
    return Demand(
        meta=Meta(request_id="r", tenant="t", model=model),
        prompt_tokens=3,
        max_tokens=9,
        expected_tokens=5,
        choices=1,
        block_keys=b"",
        namespace=b"",
        tokenizer_digest=b"d",
    )


def lease_at(
    schedulers: Schedulers, *, queue_s: float = 10, no_scheduler_s: float = 1, deadline_s: float = 60
) -> Lease:
    deadline = asyncio.get_running_loop().time() + deadline_s
    return schedulers.lease(demand(), LeaseLimits(queue_s, no_scheduler_s, deadline))


def port_of(replica: Replica) -> int:
    return int(replica.address.rpartition(":")[2])


def listener(port: int) -> socket.socket | None:
    """None while somebody else listens there."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def by_address(replicas: list[Replica], address: str | None) -> Replica:
    return next(replica for replica in replicas if replica.address == address)


async def test_the_owner_is_one_live_replica_and_losing_another_does_not_move_it(replicas, eventually):
    async with connected(*replicas) as schedulers:
        owner = schedulers.owner("m")
        other = next(replica for replica in replicas if replica.address != owner)
        await other.kill()
        await eventually(lambda: len(schedulers.replicas) == 2)
        assert schedulers.owner("m") == owner
        await by_address(replicas, owner).kill()
        await eventually(lambda: len(schedulers.replicas) == 1)
        assert schedulers.owner("m") not in (owner, other.address, None)


async def test_models_spread_over_the_replicas(replicas):
    async with connected(*replicas) as schedulers:
        assert len({schedulers.owner(f"m{index}") for index in range(50)}) == 3


async def test_a_draining_replica_owns_nothing(replicas, eventually):
    async with connected(*replicas) as schedulers:
        owner = schedulers.owner("m")
        by_address(replicas, owner).drain()
        await eventually(lambda: schedulers.owner("m") != owner)


async def test_a_replica_that_came_just_now_owns_nothing_until_it_settled_and_workers_found_it(replicas, eventually):
    old, new = replicas[:2]
    old.models, new.settled = [f"m{number}" for number in range(20)], False
    names = tuple(old.models)
    async with connected(old, new) as schedulers:
        assert {schedulers.owner(name) for name in names} == {old.address}
        new.settled = True
        new.tell()
        await eventually(lambda: all(replica.settled for replica in schedulers.replicas))
        assert {schedulers.owner(name) for name in names} == {old.address}
        new.models = old.models
        new.tell()
        await eventually(lambda: {schedulers.owner(name) for name in names} == {old.address, new.address})
        assert len({schedulers.owner(f"unknown-{number}") for number in range(20)}) == 2


async def test_each_event_gets_its_grant_and_finished_ends_the_lease(replicas, eventually):
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers)
        assert (await lease.open()).attempt == 1
        assert (await lease.refused(RefusedCause.NO_ROOM, 7)).attempt == 2
        assert (await lease.failed(FailureKind.RESET, "gone", 4)).attempt == 3
        assert (await lease.parked(6)).attempt == 4
        await lease.close(Outcome.COMPLETED, Usage(prompt_tokens=3, completion_tokens=8))
        assert replicas[0].kinds() == ["open", "refused", "failed", "parked", "finished"]
        _, refused, failed, parked, finished = replicas[0].events
        assert (refused.refused.retry_after_ms, refused.refused.worker_id) == (7000, "w1")
        assert (failed.failed.kind, failed.failed.emitted_tokens) == (pb.FAILURE_KIND_RESET, 4)
        assert (parked.parked.worker_id, parked.parked.emitted_tokens) == ("w3", 6)
        assert (finished.finished.attempt, finished.finished.usage.completion_tokens) == (4, 8)
        await eventually(lambda: not replicas[0].leases)


async def test_a_queued_lease_moves_to_another_replica_with_its_age(replicas, eventually):
    async with connected(*replicas) as schedulers:
        owner = by_address(replicas, schedulers.owner("m"))
        owner.queueing = True
        lease = lease_at(schedulers)
        opening = asyncio.create_task(lease.open())
        await eventually(lambda: owner.leases)
        await asyncio.sleep(0.05)
        await owner.kill()
        assert (await opening).attempt == 1
        [again] = [event for replica in replicas if replica is not owner for event in replica.events]
        assert again.open.waited_ms >= 50
        await lease.close(Outcome.CANCELLED, Usage())


async def test_a_running_lease_is_adopted_by_another_replica_and_goes_on_there(replicas, eventually):
    async with connected(*replicas) as schedulers:
        owner = by_address(replicas, schedulers.owner("m"))
        lease = lease_at(schedulers)
        mismatched = await lease.open()
        grant = await lease.refused(RefusedCause.MISMATCH, None)
        lease.pin(b"weights", "fp32")
        await owner.kill()
        [heir] = await eventually(lambda: [r for r in replicas if r is not owner and r.kinds() == ["adopt"]])
        adopt = heir.events[0].adopt
        assert (adopt.worker.worker_id, adopt.attempt) == (grant.worker_id, grant.attempt)
        assert list(adopt.avoid) == [mismatched.worker_id]
        assert (adopt.demand.model_digest, adopt.demand.precision) == (b"weights", "fp32")
        await eventually(lambda: lease._adopting is None)
        again = await lease.failed(FailureKind.HUNG, "silent", 2)
        assert again.attempt == grant.attempt + 1
        assert heir.kinds() == ["adopt", "failed"]
        await lease.close(Outcome.COMPLETED, Usage())
        await eventually(lambda: not heir.leases)


async def test_a_lease_still_connecting_to_a_replica_that_leaves_is_granted_by_its_successor(replicas, eventually):
    """The gateway closes its channel to a replica that leaves, and every call on it must notice."""
    leaver, successor = replicas[0], Replica()
    async with connected(leaver) as schedulers:
        leaving = asyncio.create_task(leaver.leave())
        # The kernel takes connections there and nobody answers: who dials is connecting for as long as this lasts.
        with await eventually(lambda: listener(port_of(leaver))) as mute:
            lease = lease_at(schedulers)
            opening = asyncio.create_task(lease.open())
            await eventually(lambda: select.select([mute], [], [], 0)[0])
            leaver.drain()
            await eventually(lambda: not schedulers.replicas)
        await leaving
        await successor._server.start("127.0.0.1", port_of(leaver))
        assert (await opening).attempt == 1
        await lease.close(Outcome.COMPLETED, Usage())
        await successor.kill()


@pytest.mark.parametrize(("emitted", "error"), [(4, Unavailable), (0, Overloaded)])
async def test_without_a_scheduler_only_an_answer_that_broke_in_the_middle_gives_up_soon(
    emitted, error, replicas, eventually, monkeypatch
):
    monkeypatch.setattr("mesh.clients.lease.RESTART_S", 0.1)
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers, queue_s=1, no_scheduler_s=0.1)
        await lease.open()
        await replicas[0].kill()
        await eventually(lambda: not schedulers.replicas)
        with pytest.raises(error):
            await lease.failed(FailureKind.RESET, "gone", emitted)
        await lease.close(Outcome.ERROR, Usage())


async def test_a_failure_before_anyone_adopted_is_opened_anew_above_the_last_attempt(replicas, eventually):
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers)
        await lease.open()
        await replicas[0].kill()
        await eventually(lambda: not schedulers.replicas)
        asking = asyncio.create_task(lease.failed(FailureKind.RESET, "gone", 4))
        successor = Replica()
        await successor._server.start("127.0.0.1", port_of(replicas[0]))
        assert (await asking).attempt == 2
        opened = successor.events[0].open
        assert (opened.last_attempt, opened.emitted_tokens, list(opened.avoid)) == (1, 4, ["w1"])
        await lease.close(Outcome.COMPLETED, Usage())
        await successor.kill()


async def test_what_a_scheduler_says_is_raised_and_not_retried(replicas):
    replicas[0].error = Overloaded("full", code="queue_full", retry_after_s=3)
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers)
        with pytest.raises(Overloaded) as caught:
            await lease.open()
        assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 3)
        await lease.close(Outcome.ERROR, Usage())
        assert replicas[0].kinds() == ["open"]


async def test_a_wait_ends_with_the_queue_limit_or_the_deadline(replicas):
    replicas[0].queueing = True
    async with connected(replicas[0]) as schedulers:
        for given, error in (({"queue_s": 0.1}, Overloaded), ({"deadline_s": 0.1}, DeadlineExceeded)):
            lease = lease_at(schedulers, **given)
            with pytest.raises(error):
                await lease.open()
            await lease.close(Outcome.CANCELLED, Usage())


async def test_a_cut_ends_the_wait_with_its_error(replicas):
    replicas[0].queueing = True
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers)
        asyncio.get_running_loop().call_later(0.05, lease.cut, Unavailable("leaving"))
        with pytest.raises(Unavailable, match="leaving"):
            await lease.open()
        await lease.close(Outcome.CANCELLED, Usage())


async def test_of_two_cuts_at_once_the_first_counts(replicas, eventually):
    replicas[0].queueing = True
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers)
        opening = asyncio.create_task(lease.open())
        await eventually(lambda: replicas[0].leases)
        asyncio.get_running_loop().call_later(0, lease.cut, Unavailable("leaving"))
        asyncio.get_running_loop().call_soon(lease.cut, Unavailable("left"))
        with pytest.raises(Unavailable, match="left"):
            await opening
        lease.cut(Unavailable("later"))
        await lease.close(Outcome.CANCELLED, Usage())


async def test_a_caller_cancelled_while_it_gives_an_adoption_up_stays_cancelled(replicas, eventually):
    async with connected(replicas[0]) as schedulers:
        lease = lease_at(schedulers)
        await lease.open()
        await replicas[0].kill()
        await eventually(lambda: lease._adopting is not None)
        closing = asyncio.create_task(lease.close(Outcome.CANCELLED, Usage()))
        await asyncio.sleep(0)  # to where it waits for the adoption's end
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()


async def test_a_cancelled_wait_leaves_the_queue(replicas, eventually):
    replicas[0].queueing = True
    async with connected(replicas[0]) as schedulers:
        opening = asyncio.create_task(lease_at(schedulers).open())
        await eventually(lambda: replicas[0].leases)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        await eventually(lambda: not replicas[0].leases, timeout_s=1)
