"""A Prometheus histogram that one thread fills: what is observed per token may not cost what a token does.

prometheus_client's own takes a lock for the sum and one for the bucket, and looks for the bucket from below: 2 us.
This is 0.3. A scrape from another thread may see an observation that is in a bucket and not yet in the sum.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Series:
    """The observations under one set of labels. `bounds` are the buckets' upper ends, in order."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def told(self) -> tuple[list[tuple[str, float]], float]:
        """(upper end, observations up to it) for every bucket, and the sum."""
        buckets, total = [], 0
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts.copy(), strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        return buckets, self._sum


class LoopHistogram(Collector):
    """A histogram in `registry`, one Series for each set of labels."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these label values, made when first asked for."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Series(self._bounds)
        return series

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, series in self._series.copy().items():
            buckets, total = series.told()
            family.add_metric(values, buckets, total)
        yield family

    def describe(self) -> Iterable[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
