"""The service over real gRPC: workers and gateways are clients, every promise of scheduler.proto is kept."""

import asyncio
import math

import grpc
import pytest
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh.errors import error_of
from scheduler.absence import AbsencePolicy
from scheduler.breaker import State
from scheduler.queue import QueuePolicy
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.types.v1 import types_pb2 as types

BUSY = {"queued_prefill_tokens": 100_000}


def failed(grant: pb.Grant, kind: int = pb.FAILURE_KIND_RESET) -> pb.Failed:
    return pb.Failed(worker_id=grant.worker.worker_id, attempt=grant.attempt, kind=kind)


# ---- Acquire ------------------------------------------------------------------------


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


# ---- Attach -------------------------------------------------------------------------


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


# ---- WatchLoad ----------------------------------------------------------------------


async def test_watch_load_tells_at_once_then_on_change_then_each_second(mesh) -> None:
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    loop = asyncio.get_running_loop()
    first = await watch.read()
    assert (first.scheduler_id, first.settled, first.draining, len(first.workers)) == ("s1", True, False, 0)
    began = loop.time()
    await watch.read()
    assert 0.5 < loop.time() - began < 2
    worker = await mesh.worker(load={"running": (("x", 1),), "free_blocks": 77})
    began = loop.time()
    mesh_load = await watch.read()
    while not (mesh_load.workers and mesh_load.workers[0].load.seq):
        mesh_load = await watch.read()
    assert loop.time() - began < 0.7
    (state,) = mesh_load.workers
    assert (state.hello.worker_id, state.load.free_blocks, len(state.load.running)) == ("w1", 77, 0)
    await worker.close()
    while (await watch.read()).workers:
        pass
    watch.cancel()


async def test_an_absurd_wait_counts_as_a_day_and_the_watchers_go_on(mesh, eventually) -> None:
    await mesh.worker(load=BUSY)
    await mesh.open(waited_ms=4294967295)
    await eventually(lambda: mesh.waiting() == 1)
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    for _ in range(2):
        (queue,) = (await watch.read()).queues
        assert 86_400_000 <= queue.oldest_ms < 86_500_000
    watch.cancel()


async def test_watch_load_is_sent_at_most_ten_times_a_second(mesh) -> None:
    worker = await mesh.worker()
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    await watch.read()
    loop = asyncio.get_running_loop()
    began, messages = loop.time(), 0
    while messages < 6:
        await worker.report()
        await watch.read()
        messages += 1
    assert loop.time() - began >= 0.45
    watch.cancel()


async def test_watch_load_shows_queues_and_charges(mesh, eventually) -> None:
    worker = await mesh.worker()
    await (await mesh.open("r1")).grant()
    await worker.report(**BUSY, running=(("r1", 1),))
    await eventually(lambda: mesh.dispatcher.fleet.workers.rows["queued_prefill_tokens"].any())
    await mesh.open("r2")
    await eventually(lambda: mesh.waiting() == 1)
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    state = await watch.read()
    watch.cancel()
    (queue,) = state.queues
    assert (queue.queue_class, queue.waiting, queue.model, queue.pool) == ("normal/S", 1, "tiny", "default")
    assert queue.cost > 0
    assert state.workers[0].charged_tokens > 0


# ---- shutdown, metrics, traces --------------------------------------------------------


async def test_draining_ends_every_stream_at_once_and_tells_the_watchers(mesh, eventually) -> None:
    worker = await mesh.worker()
    running = await mesh.open("running")
    await running.grant()
    await worker.report(**BUSY)
    await eventually(lambda: mesh.dispatcher.fleet.workers.rows["queued_prefill_tokens"].any())
    queued = await mesh.open("queued")
    await eventually(lambda: mesh.waiting() == 1)
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    assert not (await watch.read()).draining
    assert await mesh.service.drain(2)
    for lease in (running, queued):
        status = await lease.end()
        assert status.code() is grpc.StatusCode.UNAVAILABLE
        assert error_of(status).code == "draining"
        assert error_of(status).retry_after_s
    last = await watch.read()
    assert last.draining
    assert await watch.read() is grpc.aio.EOF
    await eventually(lambda: worker.ended)
    assert worker.ended is grpc.StatusCode.UNAVAILABLE
    assert error_of(await (await mesh.open("late")).end()).code == "draining"


async def test_metrics_tell_grants_waits_workers_and_depth(mesh, eventually) -> None:
    worker = await mesh.worker()
    lease = await mesh.open("r1")
    await lease.grant()
    await worker.report(**BUSY)
    await eventually(lambda: mesh.dispatcher.fleet.workers.rows["queued_prefill_tokens"].any())
    await mesh.open("r2")
    assert mesh.metric("grants_total", reason="least expected time") == 1
    assert mesh.metric("queue_wait_seconds_count", queue_class="normal/S") == 1
    await eventually(lambda: mesh.metric("queue_depth", model="tiny", pool="default", queue_class="normal/S") == 1)
    assert mesh.metric("workers") == 1
    assert mesh.metric("leases", state="granted") == 1
    assert mesh.metric("breaker_state", worker="w1") == 0


async def test_a_breaker_opens_after_failures_in_a_row_and_a_probe_heals_it(mesh, eventually) -> None:
    await mesh.worker("w1")
    for name in ("r1", "r2"):
        lease = await mesh.open(name)
        await lease.send(failed=failed(await lease.grant(), pb.FAILURE_KIND_CONNECT))
    breaker = mesh.dispatcher.fleet.workers.get("w1").breaker
    await eventually(lambda: breaker.state is not State.CLOSED)
    probe = await mesh.open("probe")
    assert (await probe.grant()).worker.worker_id == "w1"
    await probe.send(finished=pb.Finished(attempt=1, outcome=pb.OUTCOME_COMPLETED))
    assert await probe.end() is None
    assert breaker.state is State.CLOSED


async def test_the_span_of_a_lease_explains_its_wait_and_its_place(mesh_with, eventually) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with mesh_with(interceptors=[aio_server_interceptor(tracer_provider=provider)]) as mesh:
        await mesh.worker()
        lease = await mesh.open(waited_ms=40)
        await lease.grant()
        await lease.send(finished=pb.Finished(attempt=1, outcome=pb.OUTCOME_COMPLETED))
        assert await lease.end() is None
        await eventually(lambda: any("Acquire" in span.name for span in spans.get_finished_spans()))
    span = next(span for span in spans.get_finished_spans() if "Acquire" in span.name)
    expected = {
        "shoal.queue_class": "normal/S",
        "shoal.worker": "w1",
        "shoal.placement.reason": "least expected time",
        "shoal.ahead": 0,
        "shoal.attempt": 1,
    }
    assert expected.items() <= span.attributes.items()
    assert span.attributes["shoal.queue_wait_ms"] >= 40
    assert span.attributes["shoal.candidates"] == ("w1 32.0 ms, cached 0",)
    assert [event.name for event in span.events] == ["granted"]
