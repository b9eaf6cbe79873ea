"""What an attempt's span says in the end, however the attempt ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from gpu_worker.engine.api import (
    AcceptedEvent,
    ChoicePlan,
    EngineInfo,
    FinishedEvent,
    Plan,
    Reason,
    TokensEvent,
    Usage,
)
from gpu_worker.identity import Identity
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.record import Record, recorded
from mesh.errors import Superseded
from mesh.sampling import Sampling

PLAN = Plan(
    request_id="r", attempt=2, prompt_ids=[1, 2, 3], choices=[ChoicePlan(0)], sampling=Sampling(max_tokens=9, seed=1)
)


def identity(simulated: bool = False) -> Identity:
    info = EngineInfo(
        model="tiny", architecture="LlamaForCausalLM", model_digest=b"m", tokenizer_digest=b"t", vocab_size=97,
        context_tokens=256, eos_token_ids=[2], block_tokens=16, layers=2, kv_heads=2, head_dim=8, kv_dtype="fp32",
        precision="fp32", total_blocks=64, max_sequences=4, device="cpu", simulated=simulated,
    )  # fmt: skip
    return Identity("w-1", info)


class Traced:
    """Attributes of one finished span, and the registry its metrics went to."""

    def __init__(self, *, simulated: bool = False) -> None:
        self.identity = identity(simulated)
        self.registry = CollectorRegistry()
        self.attributes: dict[str, Any] = {}

    @contextmanager
    def attempt(self) -> Iterator[Record]:
        with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("Generate") as span:
            try:
                with recorded(PLAN, self.identity, WorkerMetrics(self.registry)) as record:
                    yield record
            finally:
                self.attributes = dict(span.attributes or {})  # type: ignore[attr-defined]

    def outcomes(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("shoal_worker_requests_total", {"outcome": outcome})


def test_a_whole_answer_tells_tokens_waits_and_finish() -> None:
    traced = Traced()
    with traced.attempt() as record:
        record.note(AcceptedEvent("r", 2, {1: 2}, 7))
        record.note(TokensEvent("r", 2, 0, 0, [5, 6, 7]))
        usage = Usage(
            prompt_tokens=3, completion_tokens=2, recomputed_tokens=1, steps=4, median_step_ms=7.5, max_step_ms=20.0
        )
        record.note(FinishedEvent("r", 2, 0, Reason.STOP, 2, usage, last=True))
    assert traced.attributes.pop("shoal.first_token_ms") >= 0
    assert traced.attributes == {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "shoal.cached_tokens": 2,
        "shoal.cached_tokens.device": 2,
        "shoal.queue_ms": 7,
        "shoal.recomputed_tokens": 1,
        "shoal.steps": 4,
        "shoal.median_step_ms": 7.5,
        "shoal.max_step_ms": 20.0,
        "shoal.finish": "stop",
        "shoal.attempt": 2,
        "shoal.worker": "w-1",
        "shoal.simulated": False,
    }
    assert traced.outcomes("stop") == 1
    assert traced.registry.get_sample_value("shoal_worker_first_token_seconds_count") == 1


def test_a_simulated_answer_is_marked_as_one() -> None:
    traced = Traced(simulated=True)
    with traced.attempt():
        pass
    assert traced.attributes["shoal.simulated"] is True


def test_a_cancelled_one_says_so_and_what_it_had_used() -> None:
    traced = Traced()

    def cut_short() -> None:
        with traced.attempt() as record:
            record.note(TokensEvent("r", 2, 0, 0, [5]))
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        cut_short()
    assert traced.attributes["shoal.finish"] == "cancelled"
    assert traced.attributes["gen_ai.usage.output_tokens"] == 1
    assert traced.outcomes("cancelled") == 1


def test_an_error_is_the_outcome_by_its_cause() -> None:
    traced = Traced()
    with pytest.raises(Superseded), traced.attempt():
        raise Superseded("a newer attempt took over")
    assert traced.attributes["shoal.finish"] == "superseded"
    assert "shoal.first_token_ms" not in traced.attributes
    assert traced.outcomes("superseded") == 1
