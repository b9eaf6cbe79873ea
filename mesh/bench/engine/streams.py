"""Streams that run as long as a round needs them: when each of their tokens came, and their end by hanging up."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mesh.bench import gauges
from mesh.bench.answer import Ask, Outcome
from mesh.bench.http_target import HttpTarget
from mesh.bench.report import CannotMeasure

SETTLED_GAPS = 8  # of every stream, before anything counts
WAIT_S = 600.0
LOOK_EVERY_S = 0.02
RUNNING = 'shoal_worker_sequences{state="running"}'


@dataclass(slots=True)
class Stream:
    """One answer under way. `gaps` are (when it ended, seconds) between pieces of its text."""

    outcome: Outcome
    gaps: list[tuple[float, float]] = field(default_factory=list)

    def heard(self, gap: float) -> None:
        self.gaps.append((time.perf_counter(), gap))


def within(gaps: Iterable[tuple[float, float]], since: float, until: float) -> list[float]:
    """Those that lie between as a whole."""
    return [gap for end, gap in gaps if end - gap >= since and end <= until]


class Streams:
    """All that run. Made by `running`."""

    def __init__(self, streams: Sequence[Stream], tasks: Sequence["asyncio.Task[None]"]) -> None:
        self.all = streams
        self._tasks = tasks

    async def undisturbed(self, seconds: float) -> tuple[float, float]:
        """Wait until all flow, then so long; when that began and ended. Raises CannotMeasure if a stream ends."""
        await self._until(lambda: all(len(stream.gaps) >= SETTLED_GAPS for stream in self.all))
        began = time.perf_counter()
        await self._until(lambda: time.perf_counter() >= began + seconds)
        return began, time.perf_counter()

    async def each_past(self, moment: float) -> None:
        """Wait until each has given a token after `moment`: the gap in which it lies is known then."""
        await self._until(lambda: all(stream.gaps[-1][0] > moment for stream in self.all))

    async def _until(self, reached: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + WAIT_S
        while not reached():
            for stream, task in zip(self.all, self._tasks, strict=True):
                if task.done():
                    why = stream.outcome.error or "its answer was shorter than the round"
                    raise CannotMeasure(f"a stream ended in mid-round: {why}: {stream.outcome.detail}")
            if time.perf_counter() > deadline:
                flow = sum(len(stream.gaps) >= SETTLED_GAPS for stream in self.all)
                raise CannotMeasure(f"{flow} of {len(self.all)} streams run after {WAIT_S:g} s")
            await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def running(target: HttpTarget, asks: Sequence[Ask]) -> AsyncIterator[Streams]:
    """All of `asks` at once; what still runs at the block's end is hung up on."""
    streams = [Stream(Outcome.now()) for _ in asks]
    tasks = [
        asyncio.create_task(target.ask(ask, stream.outcome, stream.heard))
        for ask, stream in zip(asks, streams, strict=True)
    ]
    try:
        yield Streams(streams, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def idle(port: int) -> None:
    """Wait until the worker with this metrics port runs nothing. Raises CannotMeasure if that takes too long."""
    deadline = time.perf_counter() + WAIT_S
    while await gauges.read(port, RUNNING):
        if time.perf_counter() > deadline:
            raise CannotMeasure(f"the worker still runs what was hung up on {WAIT_S:g} s ago")
        await asyncio.sleep(LOOK_EVERY_S)
