"""What continuous batching's figures are beside static batching's, and what they are to be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from mesh.bench.engine.plan import Static
from mesh.bench.report import Goal, Row
from mesh.bench.stats import percentile, ratio_of_pairs

STATIC, CONTINUOUS = "static", "continuous"
MIXED, SHARED, OPEN = "mixed prompts", "a shared system prompt", "open loop"
LEAST_THROUGHPUT = {MIXED: 2.3, SHARED: 3.25}
MOST_LATENCY, MOST_KV = 0.33, 0.6  # of the static ones, with mixed prompts
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """What one batch gave: `texts` in the order of its requests."""

    tokens_per_s: float
    requests_per_s: float
    latencies_s: Sequence[float]
    peak_blocks: float
    texts: list[str]

    def latency_s(self, share: float) -> float:
        return percentile(self.latencies_s, share) or 0.0


# By kind of requests and policy, one a round.
Batches = dict[tuple[str, str], list[Served]]


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV that continuous batching has; static batching sets `aside` blocks aside for its largest batch."""

    blocks: int
    block_bytes: int
    aside: int

    @property
    def total_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"with a KV pool of {self.blocks} blocks ({self.total_bytes / MIB:.0f} MiB); "
            f"a static batch of the longest mixed prompts and answers sets {self.aside} aside"
        )


def open_rate(shape: Static, batches: Batches) -> float:
    """Requests a second of the open loop, from what static batching served of the closed batches."""
    return shape.open_load * median(one.requests_per_s for one in batches[MIXED, STATIC])


def rows(shape: Static, batches: Batches, pool: Pool) -> Iterator[Row]:
    """Each of the continuous mesh's figures beside the static one's."""
    for kind in (MIXED, SHARED):
        pair = batches[kind, CONTINUOUS], batches[kind, STATIC]
        yield _beside(
            f"output, {kind}",
            "tok/s",
            [[one.tokens_per_s for one in served] for served in pair],
            Goal(">=", LEAST_THROUGHPUT[kind], of="ratio"),
            str(pool),
        )
        yield _beside(f"p99 latency, {kind}, all at once", "s", _latencies(pair, 0.99))
        yield _beside(
            f"peak KV in use, {kind}",
            "blocks",
            [[one.peak_blocks for one in served] for served in pair],
            Goal("<=", MOST_KV, of="ratio") if kind == MIXED else None,
            str(pool),
        )
        yield _differing(kind, *pair)
    yield from _open_rows(shape, batches, pool)


def _open_rows(shape: Static, batches: Batches, pool: Pool) -> Iterator[Row]:
    pair = batches[OPEN, CONTINUOUS], batches[OPEN, STATIC]
    where = f"at {shape.open_load:.0%} of static's capacity".replace("%", " %")
    note = f"{shape.open_requests} mixed prompts a round, {open_rate(shape, batches):.2f} a second, {pool}"
    yield _beside(f"p99 latency {where}", "s", _latencies(pair, 0.99), Goal("<=", MOST_LATENCY, of="ratio"), note)
    yield _beside(f"p50 latency {where}", "s", _latencies(pair, 0.5))
    yield _differing(where, *pair)


def _latencies(pair: Sequence[list[Served]], share: float) -> list[list[float]]:
    return [[one.latency_s(share) for one in served] for served in pair]


def _differing(where: str, ours: list[Served], theirs: list[Served]) -> Row:
    texts = [pair for one, two in zip(ours, theirs, strict=True) for pair in zip(one.texts, two.texts, strict=True)]
    differ = sum(a != b for a, b in texts)
    return Row(metric=f"answers that differ, {where}", value=differ, unit="answers", goal=Goal("=", 0))


def _beside(metric: str, unit: str, pair: list[list[float]], goal: Goal | None = None, note: str = "") -> Row:
    """`pair`: a figure a round of continuous batching, and of static batching."""
    ours, theirs = pair
    return Row(
        metric=metric,
        value=median(ours),
        unit=unit,
        peer="static batching",
        peer_value=median(theirs),
        pair_ratio=ratio_of_pairs(ours, theirs),
        goal=goal,
        note=note,
    )
