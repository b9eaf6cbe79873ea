"""The cache service's Prometheus metrics, shoal_cache_*, and the counters of Stats."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mesh.errors import InvalidRequest, ShoalError
from mesh.telemetry import milliseconds

PREFIX = "shoal_cache_"
# Until an operation says otherwise: a caller's cancel or deadline gives it no other chance to say it.
CANCELLED = "cancelled"


@dataclass(slots=True)
class Tally:
    """Counts since the start. `misses` are blocks that a Get asked for and did not get."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    mismatches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(slots=True)
class Operation:
    """What one call's span and metrics say of it in the end."""

    keys: int = 0
    hits: int = 0
    size: int = 0
    outcome: str = CANCELLED


class Metrics:
    """Counts what passes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tally = Tally()
        self._operations = Counter(
            PREFIX + "operations",
            "Calls by how they ended: ok, miss, refused, invalid, no_room, stalled, cancelled.",
            ["operation", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            PREFIX + "operation_seconds",
            "Duration of a call.",
            ["operation"],
            buckets=milliseconds(),
            registry=registry,
        )
        self._hits = Counter(PREFIX + "hits", "Blocks sent by Get.", registry=registry)
        self._misses = Counter(PREFIX + "misses", "Blocks asked of Get and not sent.", registry=registry)
        self._mismatches = Counter(
            PREFIX + "mismatches", "Entries that were not what their key says; removed.", registry=registry
        )
        self._bundles = Counter(
            PREFIX + "bundles", "Bundles of Put by result: stored, held, refused.", ["result"], registry=registry
        )
        self._refused = Counter(
            PREFIX + "refused",
            "Bundles and requests refused, by reason (mesh/kv_wire.py; redis_away, redis_full).",
            ["reason"],
            registry=registry,
        )
        self._bytes = Counter(PREFIX + "bytes", "Payload read for Get, written for Put.", ["way"], registry=registry)
        self._held = Gauge(
            PREFIX + "held_bytes", "Bundles in memory, by way: received, sent.", ["way"], registry=registry
        )
        self._redis_up = Gauge(PREFIX + "redis_up", "1 while Redis answers pings.", registry=registry)
        self._redis_failures = Counter(
            PREFIX + "redis_failures", "Exchanges with Redis that failed.", ["kind"], registry=registry
        )

    @contextmanager
    def operation(self, name: str) -> Iterator[Operation]:
        """Around one call: the current span and the metrics learn how it went. An error names itself as the outcome."""
        operation, span, began = Operation(), trace.get_current_span(), time.monotonic()
        try:
            yield operation
        except ShoalError as error:
            operation.outcome = error.code or type(error).__name__.lower()
            if isinstance(error, InvalidRequest):
                operation.outcome = "invalid"
                self.refused(error.code or "request")
            raise
        finally:
            self._seconds.labels(name).observe(time.monotonic() - began)
            self._operations.labels(name, operation.outcome).inc()
            if span.is_recording():  # a call cut while it sent has closed its span already
                span.set_attribute("shoal.cache.keys", operation.keys)
                span.set_attribute("shoal.cache.hits", operation.hits)
                span.set_attribute("shoal.cache.bytes", operation.size)
                span.set_attribute("shoal.finish", operation.outcome)

    def hit(self, size: int) -> None:
        """A block of `size` bytes is sent."""
        self.tally.hits += 1
        self.tally.bytes_read += size
        self._hits.inc()
        self._bytes.labels("read").inc(size)

    def missed(self, blocks: int) -> None:
        """So many blocks were asked for and not sent."""
        self.tally.misses += blocks
        self._misses.inc(blocks)

    def mismatch(self) -> None:
        """An entry was not what its key says."""
        self.tally.mismatches += 1
        self._mismatches.inc()

    def written(self, result: str, size: int) -> None:
        """A bundle came whole; `result` is stored, held or refused. `size` = bytes given to Redis."""
        self._bundles.labels(result).inc()
        self._bytes.labels("written").inc(size)
        self.tally.bytes_written += size
        self.tally.stored += result == "stored"

    def refused(self, reason: str) -> None:
        """A bundle or a request was refused."""
        self.tally.refused += 1
        self._refused.labels(reason).inc()

    def held(self, way: str, size: Callable[[], int]) -> None:
        """`size` tells the bytes in memory whenever the metrics are read."""
        self._held.labels(way).set_function(size)

    def redis_up(self, well: bool) -> None:
        """Whether Redis answers pings."""
        self._redis_up.set(well)

    def redis_failed(self, kind: str) -> None:
        """An exchange with Redis failed."""
        self._redis_failures.labels(kind).inc()
