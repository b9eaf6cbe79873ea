"""Notices that a stream went silent, at the price of one clock read per message instead of one timer."""

import asyncio
from collections.abc import Callable

# A timer this late means that our own event loop stood still: the peer's words may lie unread in the socket.
_LATE_S = 0.25


class SilenceAlarm:
    """Calls `ring` once when one read has waited for more than `limit_s`; time between reads does not count.

    `limit_s` may be changed at any time and holds from the next check on.
    """

    def __init__(self, limit_s: float, ring: Callable[[], object]) -> None:
        self.limit_s = limit_s
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._due = self._loop.time() + limit_s
        self._timer = self._loop.call_at(self._due, self._check)

    def listen(self) -> None:
        """A read begins."""
        self._since = self._loop.time()

    def heard(self) -> None:
        """It gave something."""
        self._since = None

    def close(self) -> None:
        """No more checks."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        since = self._since
        if since is not None and now - since >= self.limit_s and now - self._due < _LATE_S:
            self._ring()
            return
        # The floor gives a late loop time to read what has arrived meanwhile.
        self._due = max((now if since is None else since) + self.limit_s, now + _LATE_S)
        self._timer = self._loop.call_at(self._due, self._check)
