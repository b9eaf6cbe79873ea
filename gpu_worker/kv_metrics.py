"""What Prometheus is told of a worker's KV beyond the counts of blocks: waste, sharing inside blocks, who gave way.

Any free block serves any sequence, so the only fragmentation is inside used blocks: slots that no token fills yet. How
much is reused is `shoal_worker_tokens_total`: cached tokens beside prompt tokens that were computed.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from gpu_worker.engine.api import KvUse


class KvMetrics:
    """Follows the engine's own counts, which only grow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"shoal_worker_{name}", what, labels, registry=registry)

        self._now = KvUse()
        gave_way = counter("preemptions", "Sequences set back to make room, by their way back.", ("way",))
        swapped = counter("swapped_bytes", "KV copied to host memory and back.", ("direction",))
        self._counters = {
            "partial_hits": counter("partial_hits", "Prompts that went on inside a block that begins like them."),
            "copied_blocks": counter("copied_blocks", "Blocks copied because others read them (copy-on-write)."),
            "recomputed_sequences": gave_way.labels("recompute"),
            "swapped_sequences": gave_way.labels("swap"),
            "swapped_out_bytes": swapped.labels("out"),
            "swapped_in_bytes": swapped.labels("in"),
        }
        unwritten = Gauge(
            "shoal_worker_unwritten_ratio", "Share of used blocks' slots that no token fills.", registry=registry
        )
        unwritten.set_function(lambda: self._now.unwritten_ratio)
        host = Gauge("shoal_worker_host_kv_bytes", "Host memory that holds swapped KV.", registry=registry)
        host.set_function(lambda: self._now.host_bytes)

    def stepped(self, use: KvUse) -> None:
        """The engine's counts after a step."""
        before, self._now = self._now, use
        for name, counter in self._counters.items():
            grown = getattr(use, name) - getattr(before, name)
            if grown > 0:
                counter.inc(grown)
