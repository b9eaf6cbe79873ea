"""What `shoal bench engine` is asked for, and what each of its sections gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.bench.report import Row
from mesh.bench.tuning import Tuning
from mesh.cli.plan import MeshPlan

SECTIONS = ("interference", "static", "perplexity", "start", "curves", "precision")
# Longer than anything a slow engine takes for one request here.
REQUEST_TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Streams, and the prompt that enters beside them. Prompt and output fit `context_tokens` together."""

    presets: Sequence[str] = ("latency", "throughput")
    streams: int = 16
    stream_prompt_tokens: int = 64
    stream_tokens: int = 2048  # of each stream: it must outlast its round
    prompt_tokens: int = 8000
    context_tokens: int = 8192
    window_s: float = 5.0  # undisturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Closed batches, and an open loop. Prompts are drawn of `prompt_tokens`, answers between the bounds."""

    requests: int = 48
    open_requests: int = 60  # of each round of the open loop
    open_load: float = (
        0.8  # its requests a second, as a share of those that static batching reached in the closed batch
    )
    prompt_tokens: Sequence[int] = (64, 512, 1024)
    answer_tokens: tuple[int, int] = (16, 256)
    system_tokens: int = 512
    pool_share: float = 0.57  # continuous batching's whole pool, as a share of what static batching sets aside
    static_kv_bytes: int = 1 << 30  # static batching's pool: more than it ever sets aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Shapes of decode steps, (sequences, context) each."""

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    batch_context: int = 256
    contexts: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192)
    context_batches: Sequence[int] = (1, 8)
    steps: int = 16
    svg: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The whole. `only` is some of SECTIONS; `engine` is MeshPlan's."""

    model: str
    only: Sequence[str] = SECTIONS
    rounds: int = 5
    tuning: Tuning = field(default_factory=Tuning)
    engine: str = "torch"
    seed: int = 0
    interference: Interference = field(default_factory=Interference)
    static: Static = field(default_factory=Static)
    curves: Curves = field(default_factory=Curves)
    text_tokens: int = 20_000
    window_tokens: int = 512
    precisions: Sequence[str] = ("fp32", "bf16", "int8", "int4")
    streams: Sequence[int] = (1, 8, 32)

    def mesh(self) -> MeshPlan:
        """A mesh of one worker."""
        return MeshPlan(model=self.model, engine=self.engine)


@dataclass(slots=True)
class Found:
    """A section's rows, and what is to be told of what it ran on."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
