"""What the engine has said of one attempt and its client has not taken yet.

Bounded without ever making the engine wait: tokens of a choice join the ones not taken yet, so a slow client holds at
most its own max_tokens per choice, and other requests notice nothing.
"""

import asyncio

from gpu_worker.engine.api import AcceptedEvent, Event, FinishedEvent, Plan, TokensEvent
from mesh.errors import ShoalError


class EventStream:
    """One attempt's events, in order per choice. Ends after the last FinishedEvent, or raises what went wrong."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.request_id = plan.request_id
        self.attempt = plan.attempt
        self.submitted = False  # the engine was told of it
        self._open = {choice.index for choice in plan.choices}
        self._accepted: AcceptedEvent | None = None
        self._tokens: dict[int, TokensEvent] = {}
        self._finished: list[FinishedEvent] = []
        self._error: ShoalError | None = None
        self._news = asyncio.Event()

    @property
    def open_choices(self) -> frozenset[int]:
        """Choices that the engine may still say something of; none after an error."""
        return frozenset() if self._error is not None else frozenset(self._open)

    @property
    def drained(self) -> bool:
        """Whether all has been said and taken."""
        return not self._open and not self._news.is_set()

    def put(self, event: Event) -> None:
        """The engine said `event`."""
        match event:
            case AcceptedEvent():
                self._accepted = event
            case TokensEvent():
                self._join(event)
            case FinishedEvent():
                self._open.discard(event.choice)
                self._finished.append(event)
        self._news.set()

    def _join(self, event: TokensEvent) -> None:
        earlier = self._tokens.setdefault(event.choice, event)
        if earlier is not event:
            earlier.ids.extend(event.ids)
            earlier.logprobs.extend(event.logprobs)

    def fail(self, error: ShoalError) -> None:
        """Nothing follows. Whoever reads gets what was said before, then `error`; the first error stays."""
        self._error = self._error or error
        self._news.set()

    async def take(self, within_s: float) -> list[Event]:
        """All that came, or nothing if nothing came in `within_s`. Raises the error once there is no event left."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return []
        events: list[Event] = [] if self._accepted is None else [self._accepted]
        events += self._tokens.values()
        events += self._finished
        self._accepted, self._tokens, self._finished = None, {}, []
        if self._error is None:
            self._news.clear()
        elif not events:
            raise self._error
        return events
