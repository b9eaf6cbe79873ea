"""What the engine has said of one attempt and its client has not taken yet.

Bounded without ever making the engine wait: tokens of a choice join the ones not taken yet, so a slow client holds at
most its own max_tokens per choice, and other requests notice nothing. Tokens that follow others sooner than a stream's
interval wait for its end: each message costs every process on its way to the client, while they share the cores with
the steps. Nothing else waits: neither the first token nor an end.
"""

import asyncio

from gpu_worker.engine.api import AcceptedEvent, Event, FinishedEvent, Plan, TokensEvent
from mesh.errors import ShoalError


class EventStream:
    """One attempt's events, in order per choice. Ends after the last FinishedEvent, or raises what went wrong.

    `interval_s` is the least time between messages that hold only tokens.
    """

    def __init__(self, plan: Plan, interval_s: float = 0.0) -> None:
        self.plan = plan
        self._interval_s = interval_s
        self._due_s = 0.0  # when tokens may be taken again, by the loop's clock
        self._later: asyncio.TimerHandle | None = None
        self.request_id = plan.request_id
        self.attempt = plan.attempt
        self.submitted = False  # the engine was told of it
        self._open = {choice.index for choice in plan.choices}
        self._accepted: AcceptedEvent | None = None
        self._tokens: dict[int, TokensEvent] = {}
        self._finished: list[FinishedEvent] = []
        self._error: ShoalError | None = None
        self._news = False
        self._waiter: asyncio.Future[None] | None = None  # of the one who reads, while there is nothing

    @property
    def open_choices(self) -> frozenset[int]:
        """Choices that the engine may still say something of; none after an error."""
        return frozenset() if self._error is not None else frozenset(self._open)

    @property
    def drained(self) -> bool:
        """Whether all has been said and taken."""
        return not self._open and not self._news

    def put(self, event: Event) -> None:
        """The engine said `event`."""
        match event:
            case AcceptedEvent():
                self._accepted = event
            case TokensEvent():
                self._join(event)
                if self._too_soon():
                    return
            case FinishedEvent():
                self._open.discard(event.choice)
                self._finished.append(event)
        self._tell()

    def _join(self, event: TokensEvent) -> None:
        earlier = self._tokens.setdefault(event.choice, event)
        if earlier is not event:
            earlier.ids.extend(event.ids)
            earlier.logprobs.extend(event.logprobs)

    def _too_soon(self) -> bool:
        """Whether to wait for the interval's end; then it is told by itself."""
        if not self._interval_s or self._news:
            return False
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due_s:
            return False
        if self._later is None:
            self._later = loop.call_at(self._due_s, self._tell)
        return True

    def fail(self, error: ShoalError) -> None:
        """Nothing follows. Whoever reads gets what was said before, then `error`; the first error stays."""
        self._error = self._error or error
        self._tell()

    def _tell(self) -> None:
        self._news = True
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._waiter is not None:
            _wake(self._waiter)

    async def _hear(self, within_s: float) -> None:
        """Until there is news, or time is up. Once per token of a stream: asyncio.timeout around an Event costs thrice
        as much as a timer of one's own.
        """
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(within_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    async def take(self, within_s: float) -> list[Event]:
        """All that came, or nothing if nothing came in `within_s`. Raises the error once there is no event left."""
        if not self._news:
            await self._hear(within_s)
        if not self._news:
            return []
        events: list[Event] = [] if self._accepted is None else [self._accepted]
        if self._tokens and self._interval_s:
            self._due_s = asyncio.get_running_loop().time() + self._interval_s
        events += self._tokens.values()
        events += self._finished
        self._accepted, self._tokens, self._finished = None, {}, []
        if self._error is None:
            self._news = False
        elif not events:
            raise self._error
        return events


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
