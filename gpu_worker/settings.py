"""A worker's settings: its engine's (fields named as in EngineConfig) and those of the process around it."""

import secrets
import socket
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ByteSize, Field

from gpu_worker.cold.settings import ColdFields
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.presets import PRESETS

_DEFAULTS = EngineConfig(model="")
# A name that means every interface says nothing about where peers should call.
_ANY_HOST = ("0.0.0.0", "::", "[::]")


class WorkerSettings(ColdFields):
    """What gpu_worker reads from SHOAL_WORKER_*."""

    service: ClassVar[str] = "WORKER"

    port: int = Field(50071, ge=0, le=65535, description="gRPC port. 0 = any free port.")
    advertise_host: str = Field(
        "",
        description="Name by which gateways reach this process. Empty = `host`, or this machine's name behind 0.0.0.0.",
    )
    worker_id: str = Field(
        "",
        max_length=64,
        description="Identity in the mesh, unique per process start. Empty = this machine's name and random digits.",
    )
    pool: str = Field("default", description="Pool of workers to belong to; requests name one.")
    fault_domain: str = Field("", description="Host, rack or zone that fails together. Empty = this machine's name.")

    kind: Literal["torch", "simulated"] = Field(
        "torch",
        description="Which engine runs the model. simulated = computes nothing: times follow a model (the settings "
        "below), words are random. For load tests without weights or a GPU.",
    )
    device: Annotated[str, BeforeValidator(str.strip)] = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto = the first CUDA device, or the CPU where there is none; or cpu, cuda, cuda:N.",
    )
    precision: Literal["auto", "fp32", "bf16", "int8", "int4"] = Field(
        _DEFAULTS.precision,
        description="Number format of weights. int8, int4: on a CPU with Shoal's kernels; int4 takes the least "
        "memory. auto = int8 with those, else bf16 on a GPU and fp32 on a CPU.",
    )
    kv_precision: Literal["auto", "fp32", "bf16", "int8"] = Field(
        _DEFAULTS.kv_precision,
        description="Number format of KV. int8, with a scale for each token and head, takes half the memory of bf16 "
        "and half the time to read. auto = that of the weights, int8 for int4. With torch only theirs.",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        _DEFAULTS.kernels,
        description="What computes on a CPU. native = Shoal's own in C++, compiled on first use; torch = torch's "
        "operators, several times slower; auto = native where there is a compiler.",
    )
    kv_bytes: ByteSize = Field(
        ByteSize(_DEFAULTS.kv_bytes),
        ge=0,
        description="Size of the KV pool, e.g. 512MiB. 0 = kv_share of the device's free memory (simulated: 40 GiB).",
    )
    kv_share: float = Field(
        _DEFAULTS.kv_share, gt=0, lt=1, description="Share of the device's free memory for KV where kv_bytes is 0."
    )
    swap_bytes: ByteSize = Field(
        ByteSize(_DEFAULTS.swap_bytes),
        ge=0,
        description="Host memory for the KV of answers that gave way, so that they need not compute it again. "
        "Taken as it is used. 0 = none.",
    )
    preset: Literal["throughput", "latency", "mixed"] = Field(
        _DEFAULTS.preset, description="What the engine is tuned for; the table is in operations.md."
    )
    policy: Literal["continuous", "static"] = Field(
        _DEFAULTS.policy,
        description="static = the naive baseline to measure against: padded batches of 8 that end together.",
    )
    context_tokens: int = Field(
        _DEFAULTS.context_tokens,
        ge=0,
        description="Upper limit of prompt and output together, within the model's. 0 = the preset's.",
    )
    max_sequences: int = Field(
        _DEFAULTS.max_sequences, ge=0, description="Most choices that run in one step. 0 = the preset's."
    )
    max_wait_ms: float = Field(
        _DEFAULTS.max_wait_ms,
        ge=-1,
        le=1000,
        description="Milliseconds that an idle engine waits for companions of a request, if such came before. "
        "-1 = the preset's.",
    )
    prefill_chunk: int = Field(
        _DEFAULTS.prefill_chunk,
        ge=0,
        description="Most prompt tokens a step computes, over all sequences. 0 = the preset's.",
    )
    itl_target_ms: float = Field(
        _DEFAULTS.itl_target_ms,
        ge=0,
        le=60_000,
        description="Milliseconds between a running stream's tokens that prompts of others may cause. 0 = the preset's "
        "multiple of what a step takes without them.",
    )
    prefill_step_ms: int = Field(
        _DEFAULTS.prefill_step_ms,
        ge=1,
        description="Milliseconds that a step with prompt tokens may take where nobody streams.",
    )
    max_waiting_tokens: int = Field(
        _DEFAULTS.max_waiting_tokens,
        ge=1,
        description="Prompt tokens that may wait for a place in a step; more are refused, to be placed elsewhere.",
    )
    max_waiting_sequences: int = Field(
        _DEFAULTS.max_waiting_sequences, ge=1, description="Choices that may wait for a place in a step."
    )
    expected_growth: float = Field(
        _DEFAULTS.expected_growth,
        ge=0,
        le=1,
        description="Share of max_tokens that admission reckons each choice will use.",
    )
    kv_promised: float = Field(
        _DEFAULTS.kv_promised,
        gt=0,
        description="Share of the KV pool that admission may promise. Above 1 counts on answers that end early.",
    )
    threads: int = Field(_DEFAULTS.threads, ge=0, description="Threads of the engine's matrix work. 0 = one per core.")

    omp_wait: Literal["passive", "active"] = Field(
        "passive",
        description="How threads of the matrix work wait for each other: active spins, a little faster on idle "
        "cores and ruins a step where another process wants one of them.",
    )

    simulated_step_ms: float = Field(
        _DEFAULTS.simulated_step_ms,
        ge=0,
        le=60_000,
        description="Simulated: milliseconds of every step, before what is in it. 6 = a GPU of the H100's class that "
        "reads an 8B model's bf16 weights; 60 = a small model on a CPU.",
    )
    simulated_prefill_tokens_per_s: float = Field(
        _DEFAULTS.simulated_prefill_tokens_per_s,
        gt=0,
        description="Simulated: prompt tokens a second, on top of the step. A step takes prefill_chunk of them at "
        "most: 2048 would suit a GPU.",
    )
    simulated_row_us: float = Field(
        _DEFAULTS.simulated_row_us,
        ge=0,
        le=1e6,
        description="Simulated: microseconds that each choice which decodes adds to a step (the batch effect).",
    )
    simulated_context_us: float = Field(
        _DEFAULTS.simulated_context_us,
        ge=0,
        le=1e4,
        description="Simulated: microseconds that each token of context which a step reads adds: KV size over memory "
        "bandwidth.",
    )
    simulated_kv_bytes_per_token: int = Field(
        _DEFAULTS.simulated_kv_bytes_per_token,
        ge=1,
        le=1 << 30,
        description="Simulated: KV of one token, which with kv_bytes gives the pool's size in blocks. 131072 = an 8B "
        "model in bf16 with 8 KV heads; 70272 = DeepSeek V3's latent KV.",
    )
    simulated_answer_tokens: float = Field(
        _DEFAULTS.simulated_answer_tokens,
        ge=0,
        description="Simulated: mean length at which answers end by themselves (geometric) unless ignore_eos. "
        "0 = never.",
    )

    stream_interval_ms: int = Field(
        -1,
        ge=-1,
        le=1000,
        description="Least milliseconds between two messages of one stream: tokens of shorter steps go together. Less "
        "work for every process on the way; the first token and the end never wait. 0 = a message for each step, "
        "-1 = the preset's.",
    )
    overdue_s: float = Field(
        1.5,
        gt=0,
        description="With work and no step for this long (or 20 median steps, if longer) the worker is not ready.",
    )
    hang_exit_s: float = Field(
        60.0, gt=0, description="Overdue for this long, the process ends with an error so that it is started anew."
    )
    park_s: float = Field(
        3.0, ge=0, description="Last part of drain_s: what still runs is given up in good order, to go on elsewhere."
    )

    def engine(self) -> EngineConfig:
        """What the engine process is told."""
        shared = WorkerSettings.model_fields.keys() & set(EngineConfig.__struct_fields__)
        return EngineConfig(**{name: getattr(self, name) for name in shared})

    def stream_interval_s(self) -> float:
        """The least time between two messages of one stream."""
        preset_ms = PRESETS[self.preset].stream_interval_ms
        return (preset_ms if self.stream_interval_ms < 0 else self.stream_interval_ms) / 1000

    def identity(self) -> str:
        """The worker's id: as set, or a fresh one. Call once per process."""
        return self.worker_id or f"{machine()[:48]}-{secrets.token_hex(4)}"

    def advertised(self, port: int) -> str:
        """host:port by which gateways reach this process."""
        host = self.advertise_host or (machine() if self.host in _ANY_HOST else self.host)
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def machine() -> str:
    """This machine's name."""
    return socket.gethostname()
