"""What an answer has used so far, over its attempts and choices: the one place usage comes from (faults B03, B05)."""

from collections.abc import Sequence

from gateway.choice import ChoiceState
from mesh.clients.attempt import Accepted, ChoiceEnd
from mesh.clients.placement import Grant
from mesh.clients.usage import Usage


class Tally:
    """Completion tokens are the choices' own counts; the rest comes from the workers' words, attempt by attempt."""

    def __init__(self, prompt_tokens: int, choices: Sequence[ChoiceState]) -> None:
        self.attempts = 0
        self.worker = ""
        self.step_errors = 0
        self.model_digest = b""
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._first: Accepted | None = None
        self._earlier: list[Usage] = []  # attempts, the last word of each
        self._last = Usage()  # the running attempt's latest

    @property
    def precision(self) -> str:
        """Of the first worker that accepted; later attempts must have the same."""
        return "" if self._first is None else self._first.precision

    @property
    def emitted(self) -> int:
        """Tokens received, over all choices."""
        return sum(len(choice.ids) for choice in self._choices)

    def begin(self, grant: Grant) -> None:
        """Another attempt."""
        self.attempts = grant.attempt
        self.worker = grant.worker_id
        self._earlier.append(self._last)
        self._last = Usage()

    def accepted(self, accepted: Accepted) -> None:
        if self._first is None:
            self._first = accepted
            self.model_digest = accepted.model_digest

    def ended(self, end: ChoiceEnd) -> None:
        """`end.usage` covers the attempt so far."""
        self._last = end.usage

    def usage(self) -> Usage:
        """Nothing at all before a worker took it: then nothing was computed."""
        if self._first is None:
            return Usage()
        attempts = [*self._earlier, self._last]
        longest = max(attempts, key=lambda attempt: attempt.steps)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached=self._first.cached,
            recomputed_tokens=sum(attempt.recomputed_tokens for attempt in attempts),
            precision=self.precision,
            queue_ms=self._first.queue_ms,
            first_token_ms=next((one.first_token_ms for one in attempts if one.first_token_ms), 0),
            steps=sum(attempt.steps for attempt in attempts),
            median_step_ms=longest.median_step_ms,
            max_step_ms=max(attempt.max_step_ms for attempt in attempts),
        )
