"""What the engine process is told when it starts. Crosses the process border, so it is a msgspec struct."""

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's settings; every number has a default that serves a small model on a laptop."""

    model: str  # a pulled name or a folder's path (mesh.models.find)
    kind: Literal["torch", "simulated"] = "torch"
    device: str = "cpu"  # "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N"
    precision: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"  # auto: what models/registry.py says
    kv_precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"  # auto: what models/native_llama.py says
    kernels: Literal["auto", "native", "torch"] = "auto"  # on a CPU: those in C++, or torch's operators
    kv_bytes: int = 0  # size of the KV pool; 0 = kv_share of the device's free memory
    kv_share: float = 0.25
    swap_bytes: int = 256 << 20  # host memory for the KV of sequences that gave way; 0 = they compute it again
    preset: Literal["throughput", "latency", "mixed"] = "mixed"  # what 0 means in the next five (presets.py)
    context_tokens: int = 0  # upper limit of prompt + output; never more than the model's, nor than the pool holds
    max_sequences: int = 0  # choices that run in one step
    max_wait_ms: float = -1.0  # an idle engine waits so long for companions of a request; below 0 = preset's
    prefill_chunk: int = 0  # most prompt tokens a step computes, summed over sequences; decodes come on top
    itl_target_ms: float = 0.0  # what a step with prompts may take beside running streams
    prefill_step_ms: int = 500  # what a step with prompts may take where nobody streams
    policy: Literal["continuous", "static"] = "continuous"  # static = the naive baseline (static_policy.py)
    max_waiting_tokens: int = 16_384  # prompt tokens without a place in a step; more are refused with Overloaded
    max_waiting_sequences: int = 256
    expected_growth: float = 0.5  # share of max_tokens that admission reckons each choice will use
    kv_promised: float = 1.0  # share of the pool that admission may promise; above 1 counts on answers that end early
    threads: int = 0  # of the matrix work; 0 = one per core
    # Only for kind "simulated" (engine/simulated_time.py): a GPU of the H100's class with an 8B model in bf16.
    simulated_step_ms: float = 6.0  # every step: reading 16 GB of weights at 3 TB/s, and launching kernels
    simulated_prefill_tokens_per_s: float = 20_000.0  # 16 GFLOP a token at a third of 990 TFLOP/s
    simulated_row_us: float = 40.0  # a decoding choice: its matmuls' and its sampling's share
    simulated_context_us: float = 0.06  # a token of context that a step reads: 128 KiB of KV at 2 TB/s
    simulated_kv_bytes_per_token: int = 131_072  # 32 layers x 8 heads x 128 x (K and V) x 2 bytes
    simulated_answer_tokens: float = 200.0  # mean length at which answers end by themselves; 0 = they never do
