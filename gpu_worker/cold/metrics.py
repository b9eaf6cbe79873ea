"""What Prometheus is told of the shared tier of KV, as this worker meets it: shoal_worker_cold_*."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from mesh.telemetry import milliseconds


class ColdMetrics:
    """Counts; nothing is decided by it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"shoal_worker_cold_{name}", what, labels, registry=registry)

        self._lookups = counter(
            "lookups",
            "Prompts with blocks that the device lacks, by what came of asking: hit (all), partial, miss, away (no "
            "service), late (the time was over), slow (computing is faster), few (too few to ask for), full (no room "
            "on the device), cancelled.",
            "outcome",
        )
        self._calls = counter(
            "calls",
            "Calls (match, fetch, store) by how they ended (words of mesh/clients/cache.py).",
            "call",
            "outcome",
        )
        self._blocks = counter(
            "blocks",
            "Blocks: fetched, refused (by the device), stored, dropped (the queue was full), gone (evicted before they "
            "were stored), unstored (the service did not take them), held (computed, but not seen often enough to be "
            "stored).",
            "what",
        )
        self._bytes = counter("bytes", "KV that came (in) and went (out).", "way")
        self._fetch = Histogram(
            "shoal_worker_cold_fetch_seconds",
            "From looking up to the last block, for prompts that asked.",
            registry=registry,
            buckets=milliseconds(),
        )

    def looked_up(self, outcome: str, seconds: float) -> None:
        """A prompt's lookup ended."""
        self._lookups.labels(outcome).inc()
        if seconds:
            self._fetch.observe(seconds)

    def called(self, call: str, outcome: str) -> None:
        """A call of the service ended."""
        self._calls.labels(call, outcome).inc()

    def blocks(self, what: str, count: int = 1) -> None:
        self._blocks.labels(what).inc(count)

    def moved(self, way: str, size_bytes: int) -> None:
        self._bytes.labels(way).inc(size_bytes)
