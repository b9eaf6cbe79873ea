"""The scheduler's Prometheus metrics: shoal_scheduler_*."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from mesh.histogram import LoopHistogram
from mesh.telemetry import milliseconds
from scheduler.breaker import State as BreakerState
from scheduler.dispatcher import Dispatcher
from scheduler.effects import Effect, Ended, Granted, Requeued
from scheduler.leases import State

PREFIX = "shoal_scheduler_"


class Metrics:
    """Counts effects as they pass; gauges are set by `observe`, on the loop that owns the state."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._wait = LoopHistogram(
            PREFIX + "queue_wait_seconds", "Time in queues until a grant.", ["queue_class"], milliseconds(), registry
        )
        self._grants = Counter(PREFIX + "grants", "Grants by why that worker.", ["reason"], registry=registry)
        self._requeues = Counter(PREFIX + "requeues", "Requests queued again, by cause.", ["cause"], registry=registry)
        self._ended = Counter(PREFIX + "leases_ended", "Leases ended here, by code.", ["code"], registry=registry)
        self._depth = Gauge(
            PREFIX + "queue_depth", "Requests waiting.", ["model", "pool", "queue_class"], registry=registry
        )
        self._leases = Gauge(PREFIX + "leases", "Open leases by state.", ["state"], registry=registry)
        self._workers = Gauge(PREFIX + "workers", "Workers attached.", registry=registry)
        self._charges = Gauge(PREFIX + "charges", "Charges held on workers.", registry=registry)
        self._breakers = Gauge(
            PREFIX + "breaker_state", "0 closed, 1 half open, 2 open.", ["worker"], registry=registry
        )
        self._strays = Gauge(PREFIX + "strays", "Running attempts voted out here.", registry=registry)

    def count(self, effect: Effect) -> None:
        """One effect is carried out."""
        if isinstance(effect, Granted):
            self._grants.labels(effect.reason).inc()
            if not effect.adopted:
                self._wait.labels(effect.queue_class).observe(effect.waited_s)
        elif isinstance(effect, Requeued):
            self._requeues.labels(effect.cause).inc()
        elif isinstance(effect, Ended):
            error = effect.error
            self._ended.labels("ok" if error is None else error.code or type(error).__name__).inc()

    def observe(self, dispatcher: Dispatcher, now: float) -> None:
        """Set the gauges. Labels of what is gone go with it."""
        self._depth.clear()
        for stat in dispatcher.queues(now):
            self._depth.labels(stat.model, stat.pool, stat.queue_class).set(stat.waiting)
        for state in State:
            self._leases.labels(state.value).set(dispatcher.lease_count(state))
        workers = dispatcher.fleet.workers
        self._workers.set(len(workers))
        self._charges.set(len(dispatcher.fleet.ledger))
        self._breakers.clear()
        for worker in workers:
            self._breakers.labels(worker.hello.worker_id).set(int(BreakerState(worker.breaker.state)))
        self._strays.set(sum(len(worker.strays) for worker in workers))
