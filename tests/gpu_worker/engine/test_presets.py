"""Presets fill in what is not set."""

import pytest

from gpu_worker.engine import presets
from gpu_worker.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("preset", "sequences", "wait_s", "chunk", "context"),
    [
        ("throughput", (32, 64), (0.05, 0.1), 2048, 8192),
        ("latency", (8, 16), (0.01, 0.03), 512, 4096),
        ("mixed", (16, 32), (0.03, 0.05), 1024, 6144),
    ],
)
def test_a_preset_is_its_row_of_the_matrix(lab, preset, sequences, wait_s, chunk, context) -> None:
    config = EngineConfig(model="m", preset=preset)
    settled, limit = presets.settled(config), presets.batch_limit(config)
    assert (limit.fewest, limit.most) == sequences
    assert settled.max_sequences == sequences[1]
    window = presets.window_of(config, lab.engine().info)
    assert (window.least_s, window.most_s) == wait_s
    assert (settled.prefill_chunk, settled.context_tokens) == (chunk, context)
    assert presets.pace(config).goals.most_tokens == chunk
    assert presets.settled(settled) == settled


def test_what_is_set_goes_before_the_preset(lab) -> None:
    own = {"max_sequences": 5, "prefill_chunk": 7, "context_tokens": 9000, "max_wait_ms": 0, "itl_target_ms": 40}
    config = EngineConfig(model="m", preset="latency", **own)
    assert presets.settled(config) == config
    limit = presets.batch_limit(config)
    assert (limit.fewest, limit.most, limit.target_s) == (5, 5, 0.04)
    assert presets.window_of(config, lab.engine().info).most_s == 0
    goals = presets.pace(config).goals
    assert (goals.most_tokens, goals.itl_target_s) == (7, 0.04)


def test_a_most_of_ones_own_is_the_limit_whatever_the_load() -> None:
    limit = presets.batch_limit(EngineConfig(model="m", preset="latency", max_sequences=24))
    assert (limit.fewest, limit.most) == (24, 24)


def test_the_default_is_mixed_and_never_more_than_the_model_can(lab) -> None:
    assert EngineConfig(model="m").preset == "mixed"
    info = lab.engine(blocks=2000).info
    assert (info.max_sequences, info.context_tokens) == (32, 256)
