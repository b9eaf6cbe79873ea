"""A budget, of bytes in memory or of calls: whoever wants more than is left waits, for a bounded time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mesh.errors import Overloaded

RETRY_S = 1.0


class Budget:
    """At most `limit` of `unit` are held at once, whoever holds them."""

    def __init__(self, limit: int, wait_s: float, unit: str = "bytes") -> None:
        self.held = 0
        self._unit = unit
        self._limit = limit
        self._wait_s = wait_s
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `size` of them. Raises Overloaded if they are not free in time, or never will be."""
        if self.held + size > self._limit:
            await self._wait(size)
        self.held += size
        try:
            yield
        finally:
            self.held -= size
            async with self._freed:
                self._freed.notify_all()

    async def _wait(self, size: int) -> None:
        try:
            async with asyncio.timeout(self._wait_s), self._freed:
                await self._freed.wait_for(lambda: self.held + size <= self._limit)
        except TimeoutError:
            message = f"{self.held} of {self._limit} {self._unit} are held by others"
            raise Overloaded(message, retry_after_s=RETRY_S) from None
