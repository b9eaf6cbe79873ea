"""What is written down of a request when it is over: attributes of its span, and its one line in the log."""

import logging
from dataclasses import dataclass

from gateway.output import Output
from gateway.request import Request
from gateway.tracing import RequestTrace

log = logging.getLogger("shoal.access")


@dataclass(frozen=True, slots=True)
class Ending:
    """`total_ms` is from its arrival, `queue_ms` the sum of its waits for a place."""

    request: Request
    output: Output
    queue_ms: int
    total_ms: int

    @property
    def _first_token_ms(self) -> int | None:
        started_s = self.output.started_s
        return None if started_s is None else round((started_s - self.request.arrived) * 1000)

    def describe(self, trace: RequestTrace) -> None:
        """What the span of a request is told at its end."""
        if not trace.recording:
            return
        tally, usage = self.output.tally, self.output.tally.usage()
        if self._first_token_ms is not None:
            trace.attributes({"shoal.ttft_ms": self._first_token_ms})
        trace.attributes(
            {
                "shoal.queue_wait_ms": self.queue_ms,
                "shoal.attempts": tally.attempts,
                "shoal.worker": tally.worker,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "shoal.usage.cached_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [
                    choice.reason.name.lower() for choice in self.output.choices if choice.reason is not None
                ],
            }
        )

    def log(self, outcome: str) -> None:
        """`outcome` as in metrics: "ok", "cancelled" or an HTTP status."""
        if not log.isEnabledFor(logging.INFO):
            return
        request, tally, usage = self.request, self.output.tally, self.output.tally.usage()
        fields = {
            "request_id": request.request_id,
            "client_request_id": request.client_request_id,
            "model": request.model,
            "tenant": request.tenant.name,
            "outcome": outcome,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
            "completion_tokens": usage.completion_tokens,
            "precision": usage.precision,
            "steps": usage.steps,
            "median_step_ms": usage.median_step_ms,
            "max_step_ms": usage.max_step_ms,
            "ttft_ms": self._first_token_ms,
            "total_ms": self.total_ms,
            "queue_ms": self.queue_ms,
            "attempts": tally.attempts,
            "worker": tally.worker,
        }
        log.info("%s ended: %s", request.request_id, outcome, extra={"fields": fields})
