"""Sends requests to targets in a closed loop (so many streams) or an open one (at given times), and measures itself.

Both loops are bounded: by a number of requests, a time, and each request's own timeout.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mesh.bench.answer import Ask, Outcome
from mesh.bench.stats import Histogram
from mesh.bench.target import Target


@dataclass(slots=True)
class Run:
    """What a load gave. `cpu_s` is this process's own, drawing left out; `gaps` are seconds between pieces of text."""

    outcomes: list[Outcome] = field(default_factory=list)
    gaps: Histogram = field(default_factory=Histogram)
    began: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0
    open_loop: bool = False

    @property
    def wall_s(self) -> float:
        """From the first request's time to the last one's end."""
        return max(1e-9, self.ended - self.began)

    @property
    def whole(self) -> list[Outcome]:
        """The answers that lack nothing."""
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def tokens(self) -> int:
        """Output tokens of whole answers: those of broken ones are of no use to a client."""
        return sum(outcome.tokens for outcome in self.whole)

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.outcomes if outcome.error)


class Generator:
    """Spreads requests over `targets` in turn. `on_end` hears of each end; `drawing_s` tells its CPU seconds."""

    def __init__(
        self,
        targets: Sequence[Target],
        on_end: Callable[[], None] = lambda: None,
        drawing_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._targets = targets
        self._on_end = on_end
        self._drawing_s = drawing_s
        self._turn = 0

    async def closed(self, asks: Iterator[Ask], *, streams: int, requests: int, duration_s: float | None) -> Run:
        """`streams` requests at a time, `requests` in all; none is begun after `duration_s`."""
        run, left = Run(), requests
        began = self._begin(run)
        until = began[0] + duration_s if duration_s is not None else None

        async def stream() -> None:
            nonlocal left
            while left > 0 and (until is None or time.perf_counter() < until):
                left -= 1
                await self._one(run, next(asks), time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(streams, requests)):
                group.create_task(stream())
        return self._end(run, began)

    async def open(self, asks: Iterable[Ask], *, most_in_flight: int) -> Run:
        """Each request at its own time, whether earlier ones have ended or not. Over the bound it counts as failed."""
        run, in_flight = Run(open_loop=True), 0
        began = self._begin(run)

        async def one(ask: Ask, due: float) -> None:
            nonlocal in_flight
            try:
                await self._one(run, ask, due)
            finally:
                in_flight -= 1

        async with asyncio.TaskGroup() as group:
            for ask in asks:
                due = began[0] + ask.at_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if in_flight >= most_in_flight:
                    now = time.perf_counter()
                    unsent = Outcome(due=due, sent=now, ended=now)
                    unsent.fail("not sent", f"{in_flight} requests were in flight, the most that --max-in-flight lets")
                    run.outcomes.append(unsent)
                    self._on_end()
                    continue
                in_flight += 1
                group.create_task(one(ask, due))
        return self._end(run, began)

    async def _one(self, run: Run, ask: Ask, due: float) -> None:
        target = self._targets[self._turn % len(self._targets)]
        self._turn += 1
        outcome = Outcome(due=due, sent=time.perf_counter())
        await target.ask(ask, outcome, run.gaps.add)
        outcome.ended = time.perf_counter()
        run.outcomes.append(outcome)
        self._on_end()

    def _begin(self, run: Run) -> tuple[float, float]:
        run.began = time.perf_counter()
        return run.began, time.process_time() - self._drawing_s()

    def _end(self, run: Run, began: tuple[float, float]) -> Run:
        run.cpu_s = time.process_time() - self._drawing_s() - began[1]
        run.ended = max((outcome.ended for outcome in run.outcomes), default=time.perf_counter())
        return run
