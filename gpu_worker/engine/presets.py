"""The tuning matrix: what throughput, latency and mixed mean, in one table. A setting of one's own goes before it.

`sequences` is the range of the batch limit (adaptive.py), `wait_ms` that of the window in which an idle engine lets
companions of a first request come (window.py). `itl_target_ms` is how long a running stream may wait for a token:
the batch limit follows it, and steps keep to it where more prompts wait than streams run. `stretch` is what prompts may
cost the streams that run: a step that computes prompts beside them takes at most so many times what it took before they
came (pacing.py). Prompts then get (stretch - 1) / stretch of the engine's time: 80, 60 and 69 %.
`stream_interval_ms` is the least time between two messages of one stream (streams.py).
"""

from dataclasses import dataclass

import msgspec

from gpu_worker.engine.adaptive import BatchLimit
from gpu_worker.engine.api import EngineInfo
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.pacing import Goals, Pace
from gpu_worker.engine.static_policy import BATCH as STATIC_BATCH
from gpu_worker.engine.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One row. Pairs are (least, most)."""

    sequences: tuple[int, int]
    wait_ms: tuple[float, float]
    prefill_chunk: int  # most prompt tokens of a step
    context_tokens: int  # prompt + output, where the model allows more
    itl_target_ms: float
    stretch: float
    stream_interval_ms: int


PRESETS = {
    "throughput": Preset(
        sequences=(32, 64),
        wait_ms=(50, 100),
        prefill_chunk=2048,
        context_tokens=8192,
        itl_target_ms=250,
        stretch=5.0,
        stream_interval_ms=50,
    ),
    "latency": Preset(
        sequences=(8, 16),
        wait_ms=(10, 30),
        prefill_chunk=512,
        context_tokens=4096,
        itl_target_ms=60,
        stretch=2.25,
        stream_interval_ms=10,
    ),
    "mixed": Preset(
        sequences=(16, 32),
        wait_ms=(30, 50),
        prefill_chunk=1024,
        context_tokens=6144,
        itl_target_ms=120,
        stretch=3.2,
        stream_interval_ms=20,
    ),
}


def settled(config: EngineConfig) -> EngineConfig:
    """The configuration with its preset's numbers where it leaves them open. What is settled stays as it is."""
    preset = PRESETS[config.preset]
    return msgspec.structs.replace(
        config,
        max_sequences=config.max_sequences or preset.sequences[1],
        prefill_chunk=config.prefill_chunk or preset.prefill_chunk,
        context_tokens=config.context_tokens or preset.context_tokens,
    )


def pace(config: EngineConfig) -> Pace:
    """What a step may compute of prompts."""
    config, preset = settled(config), PRESETS[config.preset]
    step_s, itl_target_s = config.prefill_step_ms / 1000, config.itl_target_ms / 1000
    return Pace(Goals(config.prefill_chunk, step_s, preset.stretch, itl_target_s, preset.itl_target_ms / 1000))


def batch_limit(config: EngineConfig) -> BatchLimit:
    """How many choices may run. A `max_sequences` other than the preset's is the limit itself, whatever the load."""
    preset, most = PRESETS[config.preset], settled(config).max_sequences
    fewest = preset.sequences[0] if most == preset.sequences[1] else most
    target_ms = config.itl_target_ms or preset.itl_target_ms
    return BatchLimit(fewest, most, target_ms / 1000)


def window_of(config: EngineConfig, info: EngineInfo) -> Window:
    """How long an idle engine waits for companions. `max_wait_ms` replaces the most, unless it is negative."""
    least, most = PRESETS[config.preset].wait_ms
    most = config.max_wait_ms if config.max_wait_ms >= 0 else most
    static = config.policy == "static"
    enough = min(STATIC_BATCH, info.max_sequences) if static else info.max_sequences
    return Window(min(least, most) / 1000, most / 1000, enough, always=static)
