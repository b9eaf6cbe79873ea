"""Acquire over real gRPC: gateways are clients, every promise of scheduler.proto to them is kept."""

import grpc
import pytest

from mesh.errors import error_of
from scheduler.absence import AbsencePolicy
from scheduler.queue import QueuePolicy
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.types.v1 import types_pb2 as types

BUSY = {"queued_prefill_tokens": 100_000}


def failed(grant: pb.Grant, kind: int = pb.FAILURE_KIND_RESET) -> pb.Failed:
    return pb.Failed(worker_id=grant.worker.worker_id, attempt=grant.attempt, kind=kind)


async def test_open_is_answered_with_a_grant_that_explains_itself(mesh) -> None:
    await mesh.worker()
    grant = await (await mesh.open(waited_ms=250)).grant()
    assert (grant.worker.worker_id, grant.worker.address, grant.attempt) == ("w1", "w1:1", 1)
    assert (grant.queue_class, grant.reason, grant.scheduler_id) == ("normal/S", "least expected time", "s1")
    assert grant.waited_ms >= 250
    assert [c.worker_id for c in grant.candidates] == ["w1"]
    assert not grant.adopted
    assert not grant.HasField("prefill")


async def test_a_grant_tells_the_cached_tokens_of_each_candidate(mesh) -> None:
    blocks = [pb.BlockEvents(tier=types.KV_TIER_DEVICE, stored=b"k" * 16)]
    await mesh.worker("warm", load={"blocks": blocks})
    await mesh.worker("cold")
    grant = await (await mesh.open(block_keys=b"k" * 16 + b"l" * 16)).grant()
    assert grant.worker.worker_id == "warm"
    assert [(c.tier, c.tokens) for c in grant.candidates[0].cached] == [(types.KV_TIER_DEVICE, 16)]
    assert not grant.candidates[1].cached


async def test_cancelling_leaves_the_queue_at_once(mesh, eventually) -> None:
    await mesh.worker(load=BUSY)
    lease = await mesh.open()
    await eventually(lambda: mesh.waiting() == 1)
    lease.cancel()
    await eventually(lambda: mesh.waiting() == 0, timeout_s=1)


async def test_cancelling_a_granted_lease_ends_its_charge_with_the_first_later_report(mesh, eventually) -> None:
    worker = await mesh.worker()
    lease = await mesh.open()
    await lease.grant()
    await worker.report(running=(("r1", 1),))
    lease.cancel()
    ledger = mesh.dispatcher.fleet.ledger
    await eventually(lambda: not ledger.holds("w1", "r1", 1))
    assert len(ledger) == 1
    await worker.report()
    await eventually(lambda: len(ledger) == 0)


async def test_finished_ends_the_lease_well(mesh, eventually) -> None:
    await mesh.worker()
    lease = await mesh.open()
    await lease.grant()
    await lease.send(finished=pb.Finished(attempt=1, outcome=pb.OUTCOME_COMPLETED))
    assert await lease.end() is None


async def test_a_gateway_that_stops_sending_gives_its_lease_back(mesh, eventually) -> None:
    await mesh.worker(load=BUSY)
    lease = await mesh.open()
    await lease.half_close()
    assert await lease.end() is None
    await eventually(lambda: mesh.waiting() == 0)


async def test_a_second_lease_of_a_request_ends_the_first_with_aborted(mesh) -> None:
    await mesh.worker()
    first = await mesh.open()
    await first.grant()
    second = await mesh.open(last_attempt=1)
    error = await first.end()
    assert error.code() is grpc.StatusCode.ABORTED
    assert error_of(error).code == "superseded"
    assert (await second.grant()).attempt == 2


async def test_a_refused_request_is_granted_elsewhere(mesh) -> None:
    await mesh.worker("w1")
    lease = await mesh.open()
    await lease.grant()
    await mesh.worker("w2", load={"queued_prefill_tokens": 200})
    await lease.send(refused=pb.Refused(worker_id="w1", attempt=1, cause=pb.REFUSED_CAUSE_NO_ROOM))
    grant = await lease.grant()
    assert (grant.worker.worker_id, grant.attempt) == ("w2", 2)
    assert mesh.metric("requeues_total", cause="refused_no_room") == 1


async def test_a_killed_workers_request_is_granted_elsewhere(mesh, eventually) -> None:
    first = await mesh.worker("w1")
    lease = await mesh.open()
    grant = await lease.grant()
    await mesh.worker("w2")
    await first.close()
    await eventually(lambda: len(mesh.dispatcher.fleet.workers) == 1)
    await lease.send(failed=failed(grant))
    grant = await lease.grant()
    assert (grant.worker.worker_id, grant.attempt) == ("w2", 2)


async def test_a_failed_request_goes_to_another_worker_although_the_first_is_attached(mesh) -> None:
    await mesh.worker("w1")
    lease = await mesh.open()
    grant = await lease.grant()
    await mesh.worker("w2", load={"queued_prefill_tokens": 200})
    await lease.send(failed=failed(grant, pb.FAILURE_KIND_HUNG))
    assert (await lease.grant()).worker.worker_id == "w2"


async def test_open_keeps_away_from_workers_it_names(mesh) -> None:
    await mesh.worker("w1")
    await mesh.worker("w2", load={"queued_prefill_tokens": 200})
    assert (await (await mesh.open(avoid=["w1"])).grant()).worker.worker_id == "w2"


async def test_a_parked_request_is_granted_again(mesh) -> None:
    await mesh.worker()
    lease = await mesh.open()
    await lease.grant()
    await lease.send(parked=pb.Parked(worker_id="w1", attempt=1, emitted_tokens=4))
    assert (await lease.grant()).attempt == 2


async def test_adopt_is_answered_at_once_although_the_worker_has_not_attached(mesh) -> None:
    worker = pb.WorkerRef(worker_id="w9", address="w9:1")
    adopt = pb.Adopt(demand=mesh.demand(), worker=worker, attempt=3, waited_ms=70)
    grant = await (await mesh.lease(pb.LeaseEvent(adopt=adopt))).grant()
    assert grant.adopted
    assert (grant.worker, grant.attempt, grant.waited_ms, grant.reason) == (worker, 3, 70, "adopted")


async def test_without_a_worker_the_lease_ends_unavailable_with_a_delay(mesh) -> None:
    error = error_of(await (await mesh.open(model="absent")).end())
    assert (error.code, error.retry_after_s) == ("no_worker", 5)


async def test_a_full_queue_ends_the_lease_with_a_delay_in_the_status(mesh_with, eventually) -> None:
    async with mesh_with(queue=QueuePolicy(limit=1)) as mesh:
        await mesh.worker(load=BUSY)
        await mesh.open("r1")
        await eventually(lambda: mesh.waiting() == 1)
        status = await (await mesh.open("r2")).end()
        assert status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_of(status).code == "queue_full"
        assert error_of(status).retry_after_s >= 1


@pytest.mark.parametrize(
    ("demand", "field"),
    [
        ({"prompt_tokens": 2048}, "prompt"),
        ({"max_tokens": 5_000}, "max_tokens"),
        ({"prompt_tokens": 0}, "open.demand.prompt_tokens"),
        ({"block_keys": b"short"}, "open.demand.block_keys"),
        ({"model": ""}, "open.demand.meta.model"),
        ({"request_id": "r" * 257}, "open.demand.meta.request_id"),
        ({"model": "m" * 257}, "open.demand.meta.model"),
        ({"session_id": "s" * 257}, "open.demand.session_id"),
        ({"pool": "p" * 257}, "open.demand.pool"),
        ({"choices": 0}, "open.demand.choices"),
        ({"choices": 9}, "choices"),
        ({"choices": 4294967295}, "open.demand.choices"),
        ({"last_attempt": 4294967295}, "open.last_attempt"),
    ],
)
async def test_what_can_never_run_is_invalid_and_names_its_field(mesh, demand, field) -> None:
    await mesh.worker()
    status = await (await mesh.open(**demand)).end()
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(status).field == field


async def test_too_many_choices_are_refused_before_the_replica_has_settled(mesh_with) -> None:
    async with mesh_with(absence=AbsencePolicy(settle_s=60)) as mesh:
        status = await (await mesh.open(choices=1_025)).end()
        assert error_of(status).field == "open.demand.choices"


async def test_an_event_out_of_order_is_invalid_and_gives_the_place_back(mesh, eventually) -> None:
    await mesh.worker(load=BUSY)
    lease = await mesh.open()
    await lease.send(parked=pb.Parked(worker_id="w1", attempt=1))
    status = await lease.end()
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(status).field == "parked"
    await eventually(lambda: mesh.waiting() == 0)


async def test_an_event_that_only_a_newer_neighbour_knows_is_ignored(mesh) -> None:
    await mesh.worker()
    lease = await mesh.lease(pb.LeaseEvent())
    await lease.send(open=pb.Open(demand=mesh.demand()))
    assert (await lease.grant()).attempt == 1
