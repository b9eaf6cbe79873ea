"""What the client has of one answer: its choices and its tally, fed by any number of attempts."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

from gateway.choice import ChoiceState, token_info
from gateway.metrics import Metrics
from gateway.prompt.text_model import TextModel
from gateway.request import ChoiceFinished, Completed, Delta, Event, Request, Started
from gateway.stream import ChoiceText
from gateway.tally import Tally
from mesh.clients.attempt import ChoiceEnd, Tokens
from mesh.clients.outcomes import FailureKind, Reason, WorkerFailed


class Output:
    """Turns what workers say into events for the client. `started_s` is the loop's time of the first one."""

    def __init__(self, request: Request, model: TextModel, metrics: Metrics, *, simulated: bool) -> None:
        self._request = request
        self._simulated = simulated
        self._loop = asyncio.get_running_loop()
        self._pace = metrics.pace(request.model)
        self.started_s: float | None = None
        self.choices = [_choice(request, model, index) for index in range(request.choices)]
        self.tally = Tally(len(request.prompt_ids), self.choices)

    def tokens(self, tokens: Tokens) -> Sequence[Event]:
        """More of one choice."""
        return self._result(self.choices[tokens.choice].push(tokens))

    def ended(self, end: ChoiceEnd) -> Iterator[Event]:
        """A worker ended a choice: for the client too, unless another worker is to go on with it.

        Raises WorkerFailed where it ended because it raised in a step.
        """
        self.tally.ended(end)
        choice = self.choices[end.choice]
        if end.reason == Reason.ERROR and choice.kept is None:
            raise WorkerFailed(FailureKind.STEP_ERROR, end.message or "the sequence failed in a step")
        if end.reason == Reason.PARKED and choice.kept is None:
            return
        yield from self._result(choice.end(end))
        if choice.reason is not None:
            yield ChoiceFinished(choice.index, choice.reason)

    def abandoned(self) -> Iterator[Event]:
        """The worker is gone: choices whose stop text was complete have ended nevertheless."""
        for choice in self.choices:
            if choice.end_stopped() and choice.reason is not None:
                yield ChoiceFinished(choice.index, choice.reason)

    def completed(self, queue_ms: int) -> Completed:
        return Completed(self.tally.usage(), queue_ms, self.tally.attempts, self.tally.worker)

    def _result(self, delta: Delta | None) -> Sequence[Event]:
        now = self._loop.time()
        self._pace.result(now, self._request.arrived)
        events: tuple[Event, ...] = () if delta is None else (delta,)
        if self.started_s is None:
            self.started_s = now
            request = self._request
            events = (Started(request.request_id, request.model, request.created_unix_s, self._simulated), *events)
        return events


def _choice(request: Request, model: TextModel, index: int) -> ChoiceState:
    text = ChoiceText(model.detokenizer(request.prompt_ids), request.stop)
    return ChoiceState(index, text, partial(token_info, model), watched=bool(request.stop))
