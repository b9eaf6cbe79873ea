"""Short closed loops with the CPU of each process read before and after, and what they give together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mesh.bench.cpu import difference
from mesh.bench.generator import Generator, Run
from mesh.bench.prompts import endless
from mesh.bench.stats import per_unit
from mesh.bench.target import Target

GENERATOR = "load generator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of slice. `requests` bounds it where `seconds` does not."""

    streams: int
    input_tokens: int
    output_tokens: int
    seconds: float
    requests: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one gave. `cpu_s` goes by role; tokens are those of whole answers."""

    output_tokens: int
    requests: int
    tokens: int
    wall_s: float
    cpu_s: dict[str, float]
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.wall_s


async def run_slice(
    targets: Sequence[Target], shape: Shape, read_cpu: Callable[[], dict[str, float]], seed: int
) -> Slice:
    """Run one. `read_cpu` tells CPU seconds by role."""
    before = read_cpu()
    asks = endless(shape.input_tokens, shape.output_tokens, seed)
    run: Run = await Generator(targets).closed(
        asks, streams=shape.streams, requests=shape.requests, duration_s=shape.seconds
    )
    cpu_s = difference(before, read_cpu()) | {GENERATOR: run.cpu_s}
    return Slice(
        output_tokens=shape.output_tokens,
        requests=len(run.whole),
        tokens=run.tokens,
        wall_s=run.wall_s,
        cpu_s=cpu_s,
        errors=dict(run.errors),
    )


def split(slices: Iterable[Slice], role: str) -> tuple[float, float]:
    """A role's CPU seconds per request and per token. Raises ValueError if all answers were as long as each other."""
    return per_unit((each.requests, each.tokens, each.cpu_s[role]) for each in slices)


def errors(slices: Iterable[Slice]) -> dict[str, int]:
    """All errors by kind."""
    found: dict[str, int] = {}
    for each in slices:
        for kind, count in each.errors.items():
            found[kind] = found.get(kind, 0) + count
    return found
