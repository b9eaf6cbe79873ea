"""How a decode step's time grows with the number of sequences and with their context, and what it cannot be less than.

Measured in an engine without a mesh. The floor is what this machine showed in the same run: weights and KV at the rate
at which it reads memory, or the weights' multiplications at the rate of its int8 units, whichever takes longer. The KV
of a context is read once by every sequence; what a step does besides is the distance to the floor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mesh.bench import measurer, tuning
from mesh.bench.engine.chart import Chart, Line, svg
from mesh.bench.engine.plan import Curves, EnginePlan, Found
from mesh.bench.report import Row
from mesh.bench.tuning import Tuning

# So that every shape may run whatever the preset, and no step waits for company.
LIMITS = {"max_sequences": 64, "context_tokens": 8192, "max_wait_ms": 0, "itl_target_ms": 60_000}


@dataclass(frozen=True, slots=True)
class Floor:
    """What bounds a step: the machine's rates and the model's work. `precision` is the engine's."""

    read_gb_per_s: float
    int8_gop_per_s: float
    weight_bytes: float
    operations_per_token: float
    kv_bytes_per_token: float
    precision: str

    def ms(self, batch: int, context: int) -> float:
        """The least that a step of `batch` sequences, each at `context`, can take."""
        return max(self.memory_ms(batch, context), self.compute_ms(batch))

    def memory_ms(self, batch: int, context: int) -> float:
        return (self.weight_bytes + batch * context * self.kv_bytes_per_token) / self.read_gb_per_s / 1e6

    def compute_ms(self, batch: int) -> float:
        return batch * self.operations_per_token / self.int8_gop_per_s / 1e6


Times = Mapping[tuple[int, int], float | None]


def measure(plan: EnginePlan) -> Found:
    """Raises CannotMeasure if the engine does not start."""
    shape = plan.curves
    env = Tuning(precision=plan.tuning.precision, preset=plan.tuning.preset).env(**LIMITS)
    tuning.effective(plan.model, env)
    shapes = shapes_of(shape)
    request = {"shapes": shapes, "steps": shape.steps}
    told = measurer.run("steps", {"SHOAL_MODEL": plan.model, **env}, request, "step times")
    floor = Floor(**told["floor"])
    times = dict(zip(shapes, told["step_ms"], strict=True))
    if shape.svg is not None:
        shape.svg.write_text(drawing(shape, times, floor))
    facts: dict[str, Any] = {"precision of the steps": floor.precision}
    return Found([*rows(shape, times, floor)], facts)


def shapes_of(shape: Curves) -> list[tuple[int, int]]:
    """Every (sequences, context), each once."""
    by_batch = [(batch, shape.batch_context) for batch in shape.batches]
    by_context = [(batch, context) for batch in shape.context_batches for context in shape.contexts]
    return list(dict.fromkeys([*by_batch, *by_context]))


def rows(shape: Curves, times: Times, floor: Floor) -> Iterator[Row]:
    """The machine's limits, then each shape beside its floor."""
    yield Row(metric="memory read", value=floor.read_gb_per_s, unit="GB/s")
    yield Row(metric="int8 matmuls", value=floor.int8_gop_per_s, unit="GOP/s")
    for batch, context in shapes_of(shape):
        value = times[batch, context]
        yield Row(
            metric=f"decode step at {context:,} tokens, {batch} sequence{'s' if batch > 1 else ''}",
            value=value,
            unit="ms",
            peer="the machine's limit",
            peer_value=floor.ms(batch, context),
            note="" if value is not None else "its KV does not fit the pool",
        )


def drawing(shape: Curves, times: Times, floor: Floor) -> str:
    """Both charts as one SVG."""
    by_batch = [
        _line(f"measured, {floor.precision}", [(b, times[b, shape.batch_context]) for b in shape.batches]),
        _line("memory", [(b, floor.memory_ms(b, shape.batch_context)) for b in shape.batches], limit=True),
        _line("int8 units", [(b, floor.compute_ms(b)) for b in shape.batches], limit=True),
    ]
    by_context = []
    for batch in shape.context_batches:
        called = f"{batch} sequence{'s' if batch > 1 else ''}"
        by_context += [
            _line(called, [(context, times[batch, context]) for context in shape.contexts]),
            _line(f"memory, {called}", [(c, floor.memory_ms(batch, c)) for c in shape.contexts], limit=True),
        ]
    limits = f"limits here: memory {floor.read_gb_per_s:.0f} GB/s, int8 {floor.int8_gop_per_s:.0f} GOP/s"
    return svg(
        [
            Chart(f"Step time by sequences, {shape.batch_context} tokens of context", "sequences", "ms", by_batch),
            Chart("Step time by context", "tokens of context", "ms", by_context),
        ],
        limits,
    )


def _line(name: str, points: list[tuple[int, float | None]], *, limit: bool = False) -> Line:
    return Line(name, [(float(x), y) for x, y in points if y is not None], limit)
