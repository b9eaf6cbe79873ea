"""One request is one trace: the caller's context above, the calls to scheduler and worker below."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0.5}


@pytest.fixture
def spans(monkeypatch):
    """Finished spans by name. The provider of a process can be set but once, so only the gateway's tracer is ours."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("gateway.tracing.tracer", lambda: provider.get_tracer("test"))
    yield lambda: {span.name: span for span in exporter.get_finished_spans()}
    provider.shutdown()


async def test_the_spans_of_a_request_hang_in_the_callers_trace(mesh, play, ids_of, spans, eventually):
    mesh.worker.scripts = [play.says(ids_of("hello"), cached=16)]
    async with mesh.http() as client:
        reply = await client.post("/v1/chat/completions", json=BODY, headers={"traceparent": CALLER})
    found = await eventually(lambda: len(spans()) == 3 and spans())
    server, acquire, generate = (
        found[name] for name in ("POST /v1/chat/completions", "shoal.acquire", "shoal.generate")
    )
    assert format(server.context.trace_id, "032x") == CALLER.split("-")[1]
    assert format(server.parent.span_id, "016x") == CALLER.split("-")[2]
    for child, metadata in ((acquire, mesh.scheduler.metadata), (generate, mesh.worker.metadata)):
        assert child.parent.span_id == server.context.span_id
        trace_id, span_id = metadata[-1]["traceparent"].split("-")[1:3]
        assert (trace_id, span_id) == (CALLER.split("-")[1], format(child.context.span_id, "016x"))
    usage = reply.json()["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.system": "shoal",
        "gen_ai.request.model": "smollm2-135m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": reply.json()["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "shoal.usage.cached_tokens": 16,
        "shoal.attempts": 1,
        "shoal.worker": "w1",
        "shoal.finish": "ok",
    }
    assert {name: server.attributes[name] for name in expected} == expected
    assert {"shoal.ttft_ms", "shoal.queue_wait_ms"} <= set(server.attributes)
    assert acquire.attributes["shoal.reason"] == "least expected time"


async def test_an_error_is_in_the_trace(mesh, spans, eventually):
    async with mesh.http() as client:
        await client.post("/v1/chat/completions", json={**BODY, "temperature": 9})
    [server] = (await eventually(lambda: spans())).values()
    assert (server.attributes["shoal.finish"], server.status.is_ok) == ("400", False)


async def test_without_a_collector_no_context_is_sent_on(mesh, play, ids_of, ask):
    mesh.worker.scripts = [play.says(ids_of("hello"))]
    await ask()
    assert "traceparent" not in mesh.worker.metadata[0]
    assert "traceparent" not in mesh.scheduler.metadata[0]
