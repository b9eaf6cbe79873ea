"""Ends a call whose reader takes nothing: what was read for it would stay in memory as long as it lives."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

log = logging.getLogger("shoal.cache")


class Stall:
    """`with` it in the call's own task. A `sending` block that lasts `limit_s` cancels that task."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around giving the reader a piece. Costs a look at the clock."""
        self._since = self._loop.time()
        yield
        self._since = None

    def _look(self) -> None:
        now, since = self._loop.time(), self._since
        if since is not None and now - since >= self._limit_s and self._task is not None:
            log.warning("a reader took nothing for %g s: its call is ended", self._limit_s)
            self._task.cancel()
            return
        self._timer = self._loop.call_at((now if since is None else since) + self._limit_s, self._look)
