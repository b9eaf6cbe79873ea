"""What one attempt's span and metrics say of it in the end, however it ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace

from gpu_worker.cold.reader import Lookup
from gpu_worker.engine.api import AcceptedEvent, Event, FinishedEvent, Plan, TokensEvent, Usage
from gpu_worker.identity import Identity
from gpu_worker.metrics import WorkerMetrics
from mesh.clients.usage import TIERS
from mesh.errors import ShoalError

# Until the attempt says otherwise: a client's cancel or deadline gives the handler no other chance to say it.
CANCELLED = "cancelled"
# What only the last event tells, by its name in Usage and, after "shoal.", in the span.
_AT_THE_END = ("recomputed_tokens", "steps", "median_step_ms", "max_step_ms")


class Record:
    """Fills in as events pass."""

    def __init__(self, plan: Plan, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._prompt_tokens = len(plan.prompt_ids)
        self._output_tokens = 0
        self._cached: dict[int, int] = {}
        self._queue_ms: int | None = None
        self._first_token_ms: int | None = None
        self._usage: Usage | None = None  # at its end
        self.outcome = CANCELLED
        self.lookup = Lookup()  # of the shared tier

    @property
    def accepted(self) -> bool:
        """Whether it got its place in a step."""
        return self._queue_ms is not None

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return self._first_token_ms is not None

    def note(self, event: Event) -> None:
        """`event` is about to be sent."""
        match event:
            case AcceptedEvent():
                self._queue_ms = event.queue_ms
                self._cached = event.cached
            case TokensEvent():
                self._output_tokens += len(event.ids)
                self._first()
            case FinishedEvent() if event.last:
                self._output_tokens = event.usage.completion_tokens
                self._usage = event.usage
                self.outcome = event.reason.name.lower()

    def _first(self) -> None:
        if self._first_token_ms is None:
            waited_s = time.monotonic() - self._began
            self._first_token_ms = round(waited_s * 1000)
            self._metrics.first_token(waited_s)

    def attributes(self) -> dict[str, str | int | float]:
        """For the span."""
        found: dict[str, str | int | float | None] = {
            "gen_ai.usage.input_tokens": self._prompt_tokens,
            "gen_ai.usage.output_tokens": self._output_tokens,
            "shoal.cached_tokens": sum(self._cached.values()),
            **{f"shoal.cached_tokens.{TIERS[tier]}": tokens for tier, tokens in self._cached.items()},
            "shoal.cold_lookup": self.lookup.outcome or None,
            "shoal.cold_fetch_ms": round(self.lookup.seconds * 1000) if self.lookup.outcome else None,
            "shoal.queue_ms": self._queue_ms,
            "shoal.first_token_ms": self._first_token_ms,
            "shoal.finish": self.outcome,
        }
        if self._usage is not None:
            found |= {f"shoal.{name}": getattr(self._usage, name) for name in _AT_THE_END}
        return {name: value for name, value in found.items() if value is not None}


@contextmanager
def recorded(plan: Plan, identity: Identity, metrics: WorkerMetrics) -> Iterator[Record]:
    """Around an attempt: the current span and the metrics learn how it went. An error names itself as the outcome."""
    span = trace.get_current_span()
    record = Record(plan, metrics)
    span.set_attributes({
        "gen_ai.request.model": identity.info.model,
        "shoal.attempt": plan.attempt,
        "shoal.worker": identity.worker_id,
        "shoal.simulated": identity.info.simulated,
        "shoal.finish": CANCELLED,
    })  # fmt: skip
    try:
        yield record
    except ShoalError as error:
        record.outcome = error.code or type(error).__name__.lower()
        raise
    finally:
        if span.is_recording():  # a call cut while it sent has closed its span already
            span.set_attributes(record.attributes())
        metrics.ended(record.outcome)
