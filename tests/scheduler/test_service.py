"""The service as a whole: how it drains, and what its metrics and traces tell."""

import grpc
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh.errors import error_of
from scheduler.breaker import State
from shoal.scheduler.v1 import scheduler_pb2 as pb

BUSY = {"queued_prefill_tokens": 100_000}


def failed(grant: pb.Grant, kind: int = pb.FAILURE_KIND_RESET) -> pb.Failed:
    return pb.Failed(worker_id=grant.worker.worker_id, attempt=grant.attempt, kind=kind)


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
