"""What one RPC has yet to send: bounded, woken by events, ended once. `beside` runs what fills it while it is read."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from mesh.errors import Overloaded, ShoalError

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Iterate to receive: ends when it was ended well, raises the error it was ended with.

    A peer that does not read what it asked for is let go: a full mailbox ends with Overloaded.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._news = asyncio.Event()
        self._ended = False
        self._error: ShoalError | None = None

    def put(self, item: T) -> None:
        """Send this next. After the end it is dropped."""
        if self._ended:
            return
        if len(self._items) >= self._limit:
            self.end(Overloaded("the stream's messages are not being read"))
            return
        self._items.append(item)
        self._news.set()

    def end(self, error: ShoalError | None = None) -> None:
        """The stream is over; the first end counts. An error overtakes what was not sent."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if error is not None:
            self._items.clear()
        self._news.set()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()


@asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the block runs; it ends with the block, and its unexpected error is raised there.

    Not a TaskGroup: RPC handlers are generators, and a task group must not be held open over a `yield` (PEP 789): its
    cancellation would hit whoever is iterating the generator.
    """
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
