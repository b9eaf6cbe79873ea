"""Attach over real gRPC: workers are clients, every promise of scheduler.proto to them is kept."""

import math

import grpc
import pytest

from mesh.errors import error_of
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.types.v1 import types_pb2 as types


async def test_hello_is_answered_with_welcome(mesh, eventually) -> None:
    worker = await mesh.worker()
    await eventually(lambda: worker.got("welcome"))
    assert worker.orders[0].welcome.scheduler_id == "s1"


async def test_a_second_attach_of_a_worker_ends_the_first_with_aborted(mesh, eventually) -> None:
    first = await mesh.worker("w1")
    await eventually(lambda: first.got("welcome"))
    second = await mesh.worker("w1")
    await eventually(lambda: first.ended)
    assert first.ended is grpc.StatusCode.ABORTED
    await eventually(lambda: second.got("welcome"))
    assert (await (await mesh.open()).grant()).worker.worker_id == "w1"


async def test_a_stream_must_begin_with_hello(mesh) -> None:
    call = mesh.stub.Attach(timeout=5)
    await call.write(pb.WorkerReport(load=pb.Load(seq=1)))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert error_of(raised.value).field == "hello"


async def test_a_worker_whose_blocks_are_not_the_meshs_is_a_mismatch(mesh, eventually) -> None:
    worker = await mesh.stranger(geometry=pb.Geometry(block_tokens=32, layers=2, kv_heads=2, head_dim=8))
    await eventually(lambda: worker.ended)
    assert worker.ended is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("load", "field"),
    [
        ({"prefill_tokens_per_s": math.nan}, "load.prefill_tokens_per_s"),
        ({"decode_tokens_per_s": math.inf}, "load.decode_tokens_per_s"),
        ({"median_step_ms": -1.0}, "load.median_step_ms"),
        ({"tier_rates": [pb.TierRate(tier=types.KV_TIER_HOST, tokens_per_s=math.nan)]}, "load.tier_rates.tokens_per_s"),
    ],
)
async def test_a_rate_that_is_no_number_ends_its_workers_stream_only(mesh, eventually, load, field) -> None:
    await mesh.worker("good")
    bad = await mesh.worker("bad")
    await bad.report(**load)
    await eventually(lambda: bad.ended)
    assert bad.ended is grpc.StatusCode.INVALID_ARGUMENT
    assert field in bad.details
    assert (await (await mesh.open()).grant()).worker.worker_id == "good"


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        ({"worker_id": "w" * 257}, "hello.worker_id"),
        ({"model": "m" * 257}, "hello.model"),
        ({"pool": "p\n"}, "hello.pool"),
        ({"adapter": "a" * 257}, "hello.adapter"),
        ({"fault_domain": "\x1b[2J"}, "hello.fault_domain"),
        ({"version": "v" * 257}, "hello.version"),
        ({"address": "unix:/tmp/socket:1"}, "hello.address"),
        ({"address": "dns:///elsewhere:1"}, "hello.address"),
        ({"address": "host\0:1"}, "hello.address"),
        ({"address": "host:0"}, "hello.address"),
        ({"address": "host"}, "hello.address"),
        ({"total_blocks": 0}, "hello.total_blocks"),
        ({"max_sequences": 0}, "hello.max_sequences"),
        ({"geometry": pb.Geometry(block_tokens=16, layers=2, kv_heads=2)}, "hello.geometry.head_dim"),
        ({"geometry": pb.Geometry()}, "hello.geometry.block_tokens"),
    ],
)
async def test_a_hello_that_means_nothing_is_invalid_and_names_its_field(mesh, eventually, hello, field) -> None:
    worker = await mesh.stranger(**hello)
    await eventually(lambda: worker.ended)
    assert worker.ended is grpc.StatusCode.INVALID_ARGUMENT
    assert field in worker.details
    assert not len(mesh.dispatcher.fleet.workers)


async def test_an_ipv6_worker_may_attach(mesh) -> None:
    await mesh.worker(address="[::1]:50071")
    assert (await (await mesh.open()).grant()).worker.address == "[::1]:50071"


async def test_a_gap_in_the_sequence_orders_a_snapshot(mesh, eventually) -> None:
    worker = await mesh.worker()
    await worker.report()
    worker.skip_a_report()
    await worker.report()
    await eventually(lambda: worker.got("send_snapshot"))
    await worker.report(snapshot=True)
    await worker.report()
    await (await mesh.open()).grant()
    assert len(worker.got("send_snapshot")) == 1


async def test_attempts_without_a_lease_are_named_and_withdrawn_when_one_appears(mesh, eventually) -> None:
    worker = await mesh.worker()

    async def told(*attempts: tuple[str, int]) -> bool:
        await worker.report(running=(("r1", 2),), attach_epoch=5)
        sets = worker.got("unclaimed")
        return bool(sets) and [(a.request_id, a.attempt) for a in sets[-1].attempts] == list(attempts)

    await eventually(lambda: told(("r1", 2)))
    assert worker.got("unclaimed")[-1].attach_epoch == 5
    adopt = pb.Adopt(demand=mesh.demand(), worker=pb.WorkerRef(worker_id="w1", address="w1:1"), attempt=2)
    await (await mesh.lease(pb.LeaseEvent(adopt=adopt))).grant()
    await eventually(told)


async def test_a_draining_worker_gets_nothing_and_its_lease_goes_on(mesh, eventually) -> None:
    first = await mesh.worker("w1")
    lease = await mesh.open()
    await lease.grant()
    await first.report(draining=True, running=(("r1", 1),))
    await eventually(lambda: mesh.dispatcher.fleet.workers.rows["draining"].any())
    await mesh.worker("w2", load={"queued_prefill_tokens": 250})
    assert (await (await mesh.open("r2")).grant()).worker.worker_id == "w2"
    await lease.send(finished=pb.Finished(attempt=1, outcome=pb.OUTCOME_COMPLETED))
    assert await lease.end() is None
