"""What the engine process is told when it starts. Crosses the process border, so it is a msgspec struct."""

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's settings; every number has a default that serves a small model on a laptop."""

    model: str  # a pulled name or a folder's path (mesh.models.find)
    kind: Literal["torch"] = "torch"
    device: str = "cpu"  # "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N"
    precision: Literal["fp32", "bf16"] = "fp32"
    kv_bytes: int = 0  # size of the KV pool; 0 = kv_share of the device's free memory
    kv_share: float = 0.25
    context_tokens: int = 0  # upper limit of prompt + output; 0 = the model's. Never more than the pool holds.
    max_sequences: int = 64  # choices that run in one step
    prefill_chunk: int = 256  # most prompt tokens a step computes, summed over sequences; decodes come on top
    prefill_step_ms: int = 500  # what a step with prompt tokens should take; they are fewer where it would take longer
    max_waiting_tokens: int = 16_384  # prompt tokens without a place in a step; more are refused with Overloaded
    max_waiting_sequences: int = 256
    expected_growth: float = 0.5  # share of max_tokens that admission reckons each choice will use
    kv_promised: float = 1.0  # share of the pool that admission may promise; above 1 counts on answers that end early
    threads: int = 0  # torch's; 0 = one per core
