"""The rows of `shoal bench peers`: throughput and first tokens by the number of streams, with their goals. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from mesh.bench import vllm_peer
from mesh.bench.contender import Batch, OpenVinoContender
from mesh.bench.first_token import CACHED, NEW, Bound
from mesh.bench.load_rows import ENOUGH_TOKENS, MOST_US_PER_TOKEN
from mesh.bench.report import Goal, Row
from mesh.bench.stats import percentile, ratio_of_pairs

OPENVINO, VLLM = OpenVinoContender.name, vllm_peer.NAME
# Our output tokens a second over a peer's, by streams; for the lengths below.
LEAST = {(32, OPENVINO): 1.3, (32, VLLM): 2.5, (8, OPENVINO): 1.3, (1, OPENVINO): 1.2}
GOAL_LENGTHS = (256, 128)  # tokens in, out
FIRST_TOKEN = (Bound(VLLM, NEW, 0.5), Bound(OPENVINO, NEW, 0.9), Bound(VLLM, CACHED, 0.7))

# By engine and number of streams, one Batch a round.
Results = dict[str, dict[int, list[Batch]]]
Goals = Mapping[tuple[int, str], float]


def rows(results: Results, ours: str, streams: Sequence[int], goals: Goals) -> Iterator[Row]:
    """For each number of streams a row beside each peer: throughput, then first tokens."""
    others: list[str | None] = [name for name in results if name != ours]
    for count in streams:
        mine = results[ours][count]
        for name in others or [None]:
            theirs = results[name][count] if name is not None else None
            yield throughput(count, mine, name, theirs, goals.get((count, name or "")))
        for share, called in ((0.5, "p50"), (0.95, "p95")):
            for name in others or [None]:
                theirs = results[name][count] if name is not None else None
                yield _first_token(count, (share, called), mine, name, theirs)


def throughput(
    streams: int, ours: list[Batch], peer: str | None, theirs: list[Batch] | None, least: float | None
) -> Row:
    """`least` is the goal for ours / theirs."""
    mine = [batch.tokens_per_s for batch in ours]
    others = [batch.tokens_per_s for batch in theirs] if theirs is not None else None
    return Row(
        metric=f"output, {_streams(streams)}",
        value=median(mine),
        unit="tok/s",
        peer=peer,
        peer_value=median(others) if others is not None else None,
        pair_ratio=ratio_of_pairs(mine, others) if others is not None else None,
        goal=Goal(">=", least, of="ratio") if least is not None else None,
    )


def _first_token(
    streams: int, at: tuple[float, str], ours: list[Batch], peer: str | None, theirs: list[Batch] | None
) -> Row:
    """Over all answers of all rounds; the ratio is that of the percentiles. `at` is a share and its name."""
    share, called = at
    return Row(
        metric=f"first token {called}, {_streams(streams)}",
        value=_first_ms(ours, share),
        unit="ms",
        peer=peer,
        peer_value=None if theirs is None else _first_ms(theirs, share),
    )


def generator(ours: Mapping[int, list[Batch]]) -> Iterator[Row]:
    """What asking and reading cost this process, which shares the machine with what it measures."""
    for streams, batches in ours.items():
        seconds = [batch.generator_s for batch in batches if batch.generator_s is not None]
        tokens = sum(batch.tokens for batch in batches)
        if len(seconds) == len(batches) and tokens:
            cost = 1e6 * sum(seconds) / tokens
            bound = Goal("<=", MOST_US_PER_TOKEN) if tokens >= ENOUGH_TOKENS else None
            metric = f"load generator CPU per token, {_streams(streams)}"
            yield Row(metric=metric, value=cost, unit="µs", goal=bound)


def not_compared(results: Results, ours: str, goals: Goals, reasons: Mapping[str, str]) -> Iterator[Row]:
    """A row for each goal whose peer is not there: that goal was not measured."""
    for (streams, peer), least in goals.items():
        if peer in reasons and peer not in results and streams in results[ours]:
            row = throughput(streams, results[ours][streams], peer, None, least)
            yield Row(
                metric=row.metric,
                value=row.value,
                unit=row.unit,
                peer=peer,
                goal=row.goal,
                note=f"not compared with {peer}: {reasons[peer]}",
            )


def not_measured(missing: Mapping[str, str]) -> Iterator[Row]:
    """A row with the reason for each peer that has no figures."""
    for name, reason in missing.items():
        yield Row(metric=f"not measured: {name}", value=None, peer=name, note=reason)


def _first_ms(batches: list[Batch], share: float) -> float | None:
    seconds = percentile([first for batch in batches for first in batch.first_s], share)
    return None if seconds is None else 1000 * seconds


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"
