"""The figures of a load as a report's rows. Pure."""

from collections.abc import Callable, Iterator
from statistics import median

from mesh.bench.generator import Run
from mesh.bench.report import Goal, Row
from mesh.bench.stats import percentile

SHARES = ((0.5, "p50"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99"))
# What the generator may cost and how late it may be; it shares its cores with what it measures.
MOST_US_PER_TOKEN = 60.0
MOST_LATE_MS = 50.0
# Below this many tokens its start and its end are most of what it costs.
ENOUGH_TOKENS = 2000


def rows(run: Run, *, lean: bool) -> list[Row]:
    """All of them. `lean`: the goal for the generator's own cost holds (HTTP; the gRPC client is the users')."""
    return [*_counts(run), *_rates(run), *_latencies(run), *_prompts(run), *_generator(run, lean=lean)]


def _counts(run: Run) -> Iterator[Row]:
    failed = len(run.outcomes) - len(run.whole)
    yield Row(metric="whole answers", value=len(run.whole), unit="requests")
    yield Row(metric="errors", value=failed, unit="requests", goal=Goal("=", 0))
    for kind, count in run.errors.most_common():
        detail = next(outcome.detail for outcome in run.outcomes if outcome.error == kind)
        yield Row(metric=f"errors: {kind}", value=count, unit="requests", note=detail)


def _rates(run: Run) -> Iterator[Row]:
    yield Row(metric="requests", value=len(run.whole) / run.wall_s, unit="1/s")
    yield Row(metric="output tokens", value=run.tokens / run.wall_s, unit="tok/s")


def _latencies(run: Run) -> Iterator[Row]:
    whole = run.whole
    first = [1000 * (outcome.first - outcome.due) for outcome in whole if outcome.first is not None]
    yield from _percentiles("first token", "ms", lambda share: percentile(first, share))
    yield from _percentiles("gap between pieces", "ms", lambda share: _ms(run.gaps.percentile(share)))
    each = [
        1000 * (outcome.last - outcome.first) / (outcome.tokens - 1)
        for outcome in whole
        if outcome.first is not None and outcome.last is not None and outcome.tokens > 1
    ]
    yield from _percentiles("time per later token", "ms", lambda share: percentile(each, share))
    total = [1000 * (outcome.ended - outcome.due) for outcome in whole]
    yield from _percentiles("whole answer", "ms", lambda share: percentile(total, share))


def _percentiles(metric: str, unit: str, at: Callable[[float], float | None]) -> Iterator[Row]:
    for share, name in SHARES:
        if (value := at(share)) is not None:
            yield Row(metric=f"{metric}, {name}", value=value, unit=unit)


def _prompts(run: Run) -> Iterator[Row]:
    counted = [outcome.prompt_tokens for outcome in run.whole if outcome.prompt_tokens is not None]
    if counted:
        cached = sum(outcome.cached_tokens for outcome in run.whole)
        yield Row(metric="prompt, median as the server counts", value=median(counted), unit="tokens")
        yield Row(metric="prompt tokens found in a cache", value=100 * cached / max(1, sum(counted)), unit="%")
    answers = [outcome.tokens for outcome in run.whole]
    if answers:
        yield Row(metric="answer, median", value=median(answers), unit="tokens")


def _generator(run: Run, *, lean: bool) -> Iterator[Row]:
    pieces = sum(outcome.pieces for outcome in run.outcomes)
    if run.tokens:
        bound = Goal("<=", MOST_US_PER_TOKEN) if lean and run.tokens >= ENOUGH_TOKENS else None
        tokens = max(pieces, run.tokens)
        yield Row(metric="load generator CPU per token", value=1e6 * run.cpu_s / tokens, unit="µs", goal=bound)
    if not run.open_loop:
        return
    late = [1000 * (outcome.sent - outcome.due) for outcome in run.outcomes]
    worst = percentile(late, 0.99)
    slow = "the generator could not keep up: the latencies hold its own lateness" if (worst or 0) > MOST_LATE_MS else ""
    yield Row(metric="load generator late, p50", value=percentile(late, 0.5), unit="ms")
    yield Row(
        metric="load generator late, p99", value=worst, unit="ms", goal=Goal("<=", MOST_LATE_MS), note=slow
    )  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
