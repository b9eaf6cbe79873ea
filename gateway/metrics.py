"""What a gateway counts. Token counts are the usage that the client is told, never the number of messages."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from mesh.clients.usage import Usage
from mesh.histogram import LoopHistogram, Series
from mesh.telemetry import milliseconds


class Metrics:
    """The gateway's Prometheus metrics, all named shoal_gateway_*."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "shoal_gateway_requests",
            "Requests that ended, by route and outcome (ok, cancelled, or the error's HTTP status).",
            ["route", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "shoal_gateway_tokens",
            "Tokens as billed: prompt, of it cached, and completion.",
            ["model", "kind"],
            registry=registry,
        )
        self._resumes = Counter(
            "shoal_gateway_resumes", "Attempts that another one had to follow, by cause.", ["cause"], registry=registry
        )
        self._limits = Counter(
            "shoal_gateway_limits", "Reservations in the tenants' buckets, by outcome.", ["outcome"], registry=registry
        )
        self._first = LoopHistogram(
            "shoal_gateway_first_token_seconds",
            "From a request's arrival to its first result.",
            ["model"],
            milliseconds(),
            registry,
        )
        self._gap = LoopHistogram(
            "shoal_gateway_inter_token_seconds",
            "Between two results of one request.",
            ["model"],
            milliseconds(),
            registry,
        )
        self._queue = LoopHistogram(
            "shoal_gateway_queue_seconds",
            "Wait for a place on a worker, summed over a request's attempts.",
            ["model"],
            milliseconds(),
            registry,
        )
        self.in_flight = Gauge("shoal_gateway_in_flight", "Requests under way.", registry=registry)

    def ended(self, route: str, outcome: str) -> None:
        """One request ended: outcome "ok", "cancelled" or an HTTP status."""
        self._requests.labels(route, outcome).inc()

    def used(self, model: str, usage: Usage) -> None:
        """What one request used, as the client was or would have been told."""
        self._tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(model, "cached").inc(usage.cached_tokens)
        self._tokens.labels(model, "completion").inc(usage.completion_tokens)

    def resumed(self, cause: str) -> None:
        """An attempt ended early: "refused_no_room", "failed_reset", "parked", ..."""
        self._resumes.labels(cause).inc()

    def reserved(self, outcome: str) -> None:
        """A reservation was "granted", "refused" or "impossible"."""
        self._limits.labels(outcome).inc()

    def queued(self, model: str, seconds: float) -> None:
        """One request's waits for a place."""
        self._queue.labels(model).observe(seconds)

    def pace(self, model: str) -> "Pace":
        """For one request: its first result and the gaps between results."""
        return Pace(self._first.labels(model), self._gap.labels(model))


class Pace:
    """Observes when the results of one request come. Times are the event loop's."""

    def __init__(self, first: Series, gap: Series) -> None:
        self._first = first
        self._gap = gap
        self._last: float | None = None

    def result(self, now: float, arrived: float) -> None:
        """A result came at `now`; the request arrived at `arrived`."""
        if self._last is None:
            self._first.observe(now - arrived)
        else:
            self._gap.observe(now - self._last)
        self._last = now
