"""One request is one trace: the caller's context above, the calls to scheduler and worker below."""

import io
import json
import logging
import time

import grpc
import pytest
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway import ending
from mesh.telemetry import JsonFormatter
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0.5}


@pytest.fixture
def spans(monkeypatch):
    """Finished spans by name. The provider of a process can be set but once, so only the gateway's tracer is ours."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("gateway.tracing.tracer", lambda: provider.get_tracer("test"))
    interceptor = aio_server_interceptor(tracer_provider=provider)
    monkeypatch.setattr("mesh.telemetry.Telemetry.server_interceptors", lambda self: [interceptor])
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


@pytest.fixture
def lines():
    """The process's log lines as JSON objects, by logger."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter("shoal-gateway", "test"))
    ours = logging.getLogger("shoal")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    yield lambda name: [line for line in map(json.loads, written.getvalue().splitlines()) if line["logger"] == name]
    ours.removeHandler(handler)
    ours.setLevel(logging.NOTSET)
    ours.propagate = True


async def ask_http(mesh, gateway, headers):
    async with mesh.http(gateway) as client:
        reply = await client.post("/v1/chat/completions", json=BODY, headers=headers)
    return reply.headers["x-request-id"]


async def ask_grpc(mesh, gateway, headers):
    request = gateway_pb2.ChatRequest(
        model=BODY["model"],
        messages=[gateway_pb2.ChatMessage(role="user", content="hi")],
        options=gateway_pb2.Options(client_request_id=headers["x-request-id"]),
    )
    metadata = (("traceparent", headers["traceparent"]),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        call = gateway_pb2_grpc.InferenceServiceStub(channel).Chat(request, timeout=10, metadata=metadata)
        first, *_ = [response async for response in call]
        return first.started.request_id


@pytest.mark.parametrize("ask_door", [ask_http, ask_grpc])
async def test_log_lines_of_a_request_carry_its_trace_and_one_says_how_it_ended(
    spans, mesh, play, ids_of, lines, eventually, ask_door
):
    traced = await mesh.start_gateway()
    await eventually(lambda: not traced.missing)
    await mesh.add_worker(play.says(ids_of("one two three"), cached=16))
    mesh.worker.scripts = [play.first(3, play.says(ids_of("one two three")), play.resets)]
    request_id = await ask_door(mesh, traced, {"traceparent": CALLER, "x-request-id": "mine"})
    [ended] = await eventually(lambda: lines("shoal.access"))
    [resumed] = lines("shoal.relay")
    assert {ended["trace_id"], resumed["trace_id"]} == {CALLER.split("-")[1]}
    expected = {
        "request_id": request_id,
        "client_request_id": "mine",
        "model": "smollm2-135m",
        "tenant": "default",
        "outcome": "ok",
        "completion_tokens": 3,
        "attempts": 2,
        "worker": "w2",
    }
    assert {name: ended[name] for name in expected} == expected
    assert 0 <= ended["ttft_ms"] <= ended["total_ms"]
    [server] = [span for span in await eventually(lambda: spans().values()) if span.kind.name == "SERVER"]
    assert server.attributes["shoal.client_request_id"] == "mine"


async def test_a_request_that_failed_is_logged_with_its_status(mesh, play, ask, lines, eventually):
    mesh.worker.scripts = [play.resets]
    assert (await ask()).status_code == 502
    [ended] = await eventually(lambda: lines("shoal.access"))
    assert (ended["outcome"], ended["ttft_ms"], ended["completion_tokens"]) == ("502", None, 0)


async def test_the_line_of_a_request_costs_microseconds(mesh, play, ids_of, ask, lines, monkeypatch, eventually):
    endings = []
    monkeypatch.setattr(ending.Ending, "log", lambda self, outcome: endings.append(self))
    mesh.worker.scripts = [play.says(ids_of("hello"))]
    await ask()
    await eventually(lambda: endings)
    monkeypatch.undo()
    costs_s = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(50):
            endings[0].log("ok")
        costs_s.append((time.process_time() - began) / 50)
    assert min(costs_s) < 100e-6  # some 20 µs; the rest is for a busy machine
    assert len(lines("shoal.access")) == 1000
