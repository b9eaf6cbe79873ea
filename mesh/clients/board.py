"""The board on which a worker keeps what schedulers should know, and each scheduler's place in reading it.

Steps come faster than reports, and one scheduler may read slower than another: a `Journal` holds what one of them has
not been told, netted per block, never more than the cache itself holds. One that fell too far behind is told everything
again, which is what it asks for after a gap anyway.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

from mesh.clients.reports import BlockChange

# Keys in one report: 512 KiB, far under the message limit.
PIECE_KEYS = 32_768


class Journal:
    """One scheduler's: starts with everything, goes on with changes. `cached` is the board's set, read only."""

    def __init__(self, cached: Set[bytes]) -> None:
        self._cached = cached
        self._untold: dict[bytes, bool] = {}  # key -> whether the cache has it now
        self._pieces: deque[list[bytes]] = deque()  # of a snapshot under way
        self._everything = True
        self._news = asyncio.Event()

    def note(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """The cache lost `evicted` and gained `stored`; what is in both is there."""
        self._untold |= dict.fromkeys(evicted, False)
        self._untold |= dict.fromkeys(stored, True)
        if len(self._untold) > max(PIECE_KEYS, len(self._cached)):
            self.tell_everything()
        self._news.set()

    def tell_everything(self) -> None:
        """The next change taken starts a snapshot."""
        self._everything = True
        self._untold.clear()
        self._pieces.clear()
        self._news.set()

    def touch(self) -> None:
        """Something other than blocks changed."""
        self._news.set()

    def take(self) -> BlockChange:
        """What to tell next, at most PIECE_KEYS keys. A snapshot's pieces come one after another, changes after it."""
        self._news.clear()
        change = self._next()
        if self._pieces or self._untold:
            self._news.set()
        return change

    def _next(self) -> BlockChange:
        first = self._everything
        if first:
            self._everything = False
            self._untold.clear()
            keys = list(self._cached)
            self._pieces.extend(keys[at : at + PIECE_KEYS] for at in range(0, len(keys) or 1, PIECE_KEYS))
        if self._pieces:
            piece = self._pieces.popleft()
            return BlockChange(stored=piece, evicted=[], snapshot=first, more=bool(self._pieces))
        told = [self._untold.popitem() for _ in range(min(PIECE_KEYS, len(self._untold)))]
        return BlockChange(
            stored=[key for key, there in told if there], evicted=[key for key, there in told if not there]
        )

    async def news(self, within_s: float) -> None:
        """Return when there is something to tell, after `within_s` at the latest."""
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            return


class Board:
    """The prefix cache's keys as of the last step, and a journal for each attached scheduler."""

    def __init__(self) -> None:
        self._cached: set[bytes] = set()
        self._journals: set[Journal] = set()

    def note(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """A step changed the cache and the load; what is in both lists is cached."""
        self._cached.difference_update(evicted)
        self._cached.update(stored)
        for journal in self._journals:
            journal.note(stored, evicted)

    def replace(self, keys: Iterable[bytes]) -> None:
        """The cache holds exactly `keys`."""
        self._cached.clear()
        self._cached.update(keys)
        for journal in self._journals:
            journal.tell_everything()

    def touch(self) -> None:
        """Something other than blocks changed: load, health, draining, epoch."""
        for journal in self._journals:
            journal.touch()

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """A reader's place, from everything on."""
        journal = Journal(self._cached)
        self._journals.add(journal)
        try:
            yield journal
        finally:
            self._journals.discard(journal)
