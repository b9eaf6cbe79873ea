"""The arithmetic of measurements: percentiles, histograms, pairs and a two-part fit. Pure; no clock, no numpy."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

# Neighbouring buckets differ by 1 %, so no percentile is off by more.
_GROWTH = math.log(1.01)
_LEAST = 1e-6


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of `values`, `share` from 0 to 1; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Histogram:
    """Counts of positive values in buckets 1 % wide: any number of values in bounded memory.

    What is below a millionth counts as zero: two tokens that came in one read.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._zeros = 0

    def add(self, value: float) -> None:
        if value < _LEAST:
            self._zeros += 1
            return
        bucket = int(math.log(value / _LEAST) / _GROWTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    @property
    def count(self) -> int:
        return self._zeros + sum(self._counts.values())

    def percentile(self, share: float) -> float | None:
        """Within 1 % of the nearest-rank percentile; None of nothing."""
        rank = max(1, math.ceil(share * self.count))
        if not self.count:
            return None
        seen = self._zeros
        if seen >= rank:
            return 0.0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return _LEAST * math.exp(_GROWTH * (bucket + 0.5))
        raise AssertionError("a rank is at most the count")


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ours / theirs over interleaved pairs: what drifts during a run hits both of a pair."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def per_unit(samples: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Split a cost into a part per request and a part per token: least squares of cost = a·requests + b·tokens.

    `samples` are (requests, tokens, cost). Raises ValueError unless two of them differ in tokens per request.
    """
    rr = rt = tt = rc = tc = 0.0
    for requests, tokens, cost in samples:
        rr += requests * requests
        rt += requests * tokens
        tt += tokens * tokens
        rc += requests * cost
        tc += tokens * cost
    determinant = rr * tt - rt * rt
    if determinant <= 1e-9 * rr * tt:
        raise ValueError("runs with different answer lengths are needed to tell requests from tokens")
    return (rc * tt - tc * rt) / determinant, (tc * rr - rc * rt) / determinant
