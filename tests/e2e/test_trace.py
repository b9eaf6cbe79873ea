"""One request makes one trace, and the trace explains the wait."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

pytestmark = pytest.mark.e2e
LIMIT = 17  # tokens; no other test asks the shared mesh for so many


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_one_request_makes_one_tree_and_goes_on_with_the_callers_trace(
    collector: tuple[Any, int],
    mesh: Any,
    chat: Callable[..., Any],
    eventually: Callable[..., Awaitable[object]],
) -> None:
    received, _ = collector
    answer = await chat(mesh, "What is the capital of France?", max_tokens=LIMIT)
    assert answer.done

    def traced() -> list[tuple[str, trace_pb2.Span]]:
        roots = [span for service, span in received.spans if service == "shoal-gateway" and not span.parent_span_id]
        ours = [span for span in roots if attributes(span).get("gen_ai.request.max_tokens") == LIMIT]
        tree = received.of(ours[-1].trace_id) if ours else []
        return tree if {service for service, _ in tree} >= {"shoal-gateway", "shoal-scheduler", "shoal-worker"} else []

    tree: Any = await eventually(traced, timeout_s=20)
    spans = {span.span_id: span for _, span in tree}
    roots = [span for span in spans.values() if not span.parent_span_id]
    assert len(roots) == 1
    assert all(span.parent_span_id in spans for span in spans.values() if span is not roots[0])

    by_service: dict[str, dict[str, Any]] = {}
    for service, span in tree:
        by_service.setdefault(service, {}).update(attributes(span))
    gateway, scheduler, worker = (by_service[f"shoal-{name}"] for name in ("gateway", "scheduler", "worker"))
    assert gateway["gen_ai.request.model"] == mesh.plan.model
    assert gateway["gen_ai.usage.input_tokens"] == answer.usage["prompt_tokens"]
    assert gateway["gen_ai.usage.output_tokens"] == answer.usage["completion_tokens"]
    assert gateway["shoal.ttft_ms"] > 0
    assert scheduler["shoal.queue_wait_ms"] >= 0
    assert scheduler["shoal.queue_class"].startswith("normal/")
    assert scheduler["shoal.worker"]
    assert scheduler["shoal.placement.reason"]
    assert scheduler["shoal.candidates"]
    assert worker["shoal.cached_tokens"] >= 0
    assert worker["gen_ai.usage.output_tokens"] == answer.usage["completion_tokens"]
    assert worker["shoal.first_token_ms"] > 0

    theirs = "0af7651916cd43dd8448eb211c80319c"
    body = {"model": mesh.plan.model, "prompt": "Hello", "max_tokens": 2}
    async with httpx.AsyncClient(timeout=60) as client:
        headers = {"traceparent": f"00-{theirs}-b7ad6b7169203331-01"}
        assert (await client.post(f"{mesh.url}/v1/completions", json=body, headers=headers)).status_code == 200
    everyone = {"shoal-gateway", "shoal-scheduler", "shoal-worker"}
    await eventually(lambda: {service for service, _ in received.of(bytes.fromhex(theirs))} >= everyone, timeout_s=20)
