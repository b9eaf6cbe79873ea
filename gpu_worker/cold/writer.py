"""Stores what the engine has computed in the shared tier, in the background and a few blocks at a time.

New blocks wait in a queue of keys. The engine is asked for their bytes only when the service takes them, so a service
that is away costs the queue's room and nothing else: what does not fit is dropped, counted, and computed again by
whoever wants it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

from gpu_worker.cold.link import Link
from mesh.kv import Bundle

# Blocks of one Put, and blocks that the engine is asked for at once.
PUT_BLOCKS, ASKED_BLOCKS = 16, 2
# While no service is there: seconds between looks.
AWAY_S = 0.2

log = logging.getLogger("shoal.cold")


class Writer:
    """Run `run` beside the engine; `note` what its steps computed."""

    def __init__(self, link: Link, queue_blocks: int) -> None:
        self._link = link
        self._queue_blocks = queue_blocks
        self._queue: deque[tuple[bytes, bytes]] = deque()  # (namespace, key), a chain's parents first
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def note(self, computed: Mapping[bytes, Sequence[bytes]]) -> None:
        """A step made these blocks, by namespace."""
        new = [(root, key) for root, keys in computed.items() for key in keys if key not in self._link.known]
        taken = new[: max(0, self._queue_blocks - len(self._queue))]
        self._queue.extend(taken)
        if len(taken) < len(new):
            self._link.metrics.blocks("dropped", len(new) - len(taken))
        if taken:
            self._idle.clear()
            self._news.set()

    async def flush(self, within_s: float) -> None:
        """Wait until all that is queued is stored or the time is over; not at all if no service is there."""
        if not self._link.caches.available:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d blocks were not stored in time", len(self._queue))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            while self._queue:
                if self._link.caches.available:
                    await self._store(*self._next())
                else:
                    await asyncio.sleep(AWAY_S)
            self._news.clear()
            self._idle.set()

    def _next(self) -> tuple[bytes, list[bytes]]:
        """The queue's first blocks, all of one namespace."""
        namespace = self._queue[0][0]
        keys: list[bytes] = []
        while self._queue and self._queue[0][0] == namespace and len(keys) < PUT_BLOCKS:
            keys.append(self._queue.popleft()[1])
        return namespace, keys

    async def _store(self, namespace: bytes, keys: list[bytes]) -> None:
        sent: list[bytes] = []
        held = await self._link.caches.store(self._bundles(namespace, keys, sent))
        if held >= len(sent):
            self._link.known.add(sent)
        self._link.metrics.blocks("stored", held)
        self._link.metrics.blocks("unstored", max(0, len(sent) - held))
        self._link.metrics.moved("out", held * self._link.geometry.bundle_bytes)

    async def _bundles(self, namespace: bytes, keys: list[bytes], sent: list[bytes]) -> AsyncIterator[Bundle]:
        """The keys' blocks as far as the engine still has them; the next ones are asked for while one is sent."""
        asked: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
        left = deque(keys)
        while left or asked:
            while left and len(asked) < ASKED_BLOCKS:
                key = left.popleft()
                asked.append((key, await self._link.exchange.dump(key)))
            key, answer = asked.popleft()
            payload = await answer
            if not payload:
                self._link.metrics.blocks("gone")
                continue
            sent.append(key)
            yield Bundle.of(key, namespace, self._link.geometry, payload)
