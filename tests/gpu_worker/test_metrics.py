"""What a worker's counters say of tokens, whatever pieces they were computed in."""

from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from gpu_worker.engine.api import AcceptedEvent, EngineLoad, KvUse, Parts, StepResult
from gpu_worker.metrics import WorkerMetrics

pytestmark = pytest.mark.asyncio(loop_scope="session")

IDLE = EngineLoad(
    steps=1, waiting_sequences=0, running_sequences=0, queued_prefill_tokens=0, prefilling_sequences=0,
    free_blocks=1, cached_blocks=0, used_blocks=0, committed_blocks=0, total_blocks=1, prefill_tokens_per_s=0.0,
    decode_tokens_per_s=0.0, median_step_ms=0.0, preemptions=0, running=[],
)  # fmt: skip


async def test_a_step_counts_prompt_recomputed_and_cached_tokens_apart() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    accepted = AcceptedEvent("r", 1, {1: 32}, 0)
    metrics.stepped(StepResult(events=[accepted], load=IDLE, duration_ms=1, prompt_tokens=1, recomputed_tokens=7))
    kinds = {
        kind: registry.get_sample_value("shoal_worker_tokens_total", {"kind": kind})
        for kind in ("prompt", "recomputed", "cached")
    }
    assert kinds == {"prompt": 1, "recomputed": 7, "cached": 32}


async def test_metrics_say_what_the_engine_is(rig: Any) -> None:
    facts = {"model": "tiny", "architecture": "LlamaForCausalLM", "precision": "fp32", "device": "cpu"}
    assert rig.sample("info", **facts, preset="mixed", policy="continuous", simulated="false") == 1
    assert rig.sample("simulated") == 0


async def test_kernel_time_adds_up_by_part_over_the_steps_that_were_timed() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    parts = Parts(attention_s=0.25, feed_forward_s=0.5, sampling_s=0.125, other_s=0.0625)
    for timed in (parts, None, parts):
        metrics.stepped(StepResult(events=[], load=IDLE, duration_ms=1000, parts=timed))
    seconds = {
        part: registry.get_sample_value("shoal_worker_kernel_seconds_total", {"part": part})
        for part in ("attention", "feed_forward", "sampling", "other")
    }
    assert seconds == {"attention": 0.5, "feed_forward": 1.0, "sampling": 0.25, "other": 0.125}
    assert registry.get_sample_value("shoal_worker_timed_steps_total") == 2


async def test_gauges_tell_the_newest_step_and_nothing_before_there_is_one() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)

    def blocks(state: str) -> float | None:
        return registry.get_sample_value("shoal_worker_blocks", {"state": state})

    assert blocks("used") == 0
    for used in (3, 2):
        load = structs.replace(
            IDLE, used_blocks=used, total_blocks=9, preemptions=used, kv=KvUse(swapped_sequences=used)
        )
        metrics.stepped(StepResult(events=[], load=load, duration_ms=1))
    assert (blocks("used"), blocks("total")) == (2, 9)
    assert registry.get_sample_value("shoal_worker_preemptions_total", {"way": "swap"}) == 3
    assert registry.get_sample_value("shoal_worker_preemptions_total", {"way": "recompute"}) == 0
