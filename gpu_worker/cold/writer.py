"""Stores what the engine has computed in the shared tier, in the background and a few blocks at a time.

A block is stored once it was seen often enough (sightings.py); at once if its answer goes on elsewhere, or if the
worker leaves. What is to be stored waits in a queue of keys. The engine is asked for the bytes only when the service
takes them, so a service that is away costs the queue's room and nothing else: what does not fit is dropped, counted,
and computed again by whoever wants it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from gpu_worker.cold.device import Device
from gpu_worker.cold.link import Link
from gpu_worker.cold.sightings import Sightings
from mesh.kv import Bundle

# Blocks of one Put, and blocks that the engine is asked for at once.
PUT_BLOCKS, ASKED_BLOCKS = 16, 2
# While no service is there: seconds between looks.
AWAY_S = 0.2
# What is found a second time is found by a request that is about to start: its first token goes before the copies.
SETTLE_S = 0.3

log = logging.getLogger("shoal.cold")


class Writer:
    """Run `run` beside the engine; `note` what its steps computed, and `found` what requests found."""

    def __init__(self, link: Link, device: Device, sightings: Sightings, queue_blocks: int) -> None:
        self._link = link
        self._device = device
        self._sightings = sightings
        self._queue_blocks = queue_blocks
        self._waiting: set[bytes] = set()  # keys of the queue and of the Put under way
        self._queue: deque[tuple[bytes, bytes]] = deque()  # (namespace, key), a chain's parents first
        self._news = asyncio.Event()
        self._hurry = asyncio.Event()  # somebody waits for what is stored
        self._idle = asyncio.Event()
        self._idle.set()

    def note(self, computed: Mapping[bytes, Sequence[bytes]]) -> None:
        """A step made these blocks, by namespace."""
        for root, keys in computed.items():
            new = self._unstored(keys)
            due = self._sightings.see(root, new)
            if len(due) < len(new):
                self._link.metrics.blocks("held", len(new) - len(due))
            self._enqueue(root, due)

    def found(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """A request found its prompt's first blocks, `keys`, on the device."""
        if new := self._unstored(keys):
            self._enqueue(namespace, self._sightings.see_chain(namespace, new))

    def move(self, parked: Mapping[bytes, Sequence[bytes]]) -> None:
        """Answers go on elsewhere: their blocks, by namespace, are wanted there."""
        self._hurry.set()
        for root, keys in parked.items():
            self._enqueue(root, keys)

    async def flush(self, within_s: float) -> None:
        """Store what is queued and then what was held back, until the time is over; nothing if no service is there.

        Of more than the queue takes, what was seen last is stored.
        """
        if not self._link.caches.available:
            return
        held = [(root, key) for root, key in self._sightings if key in self._device and self._lacks(key)]
        room = self._queue_blocks - len(self._queue)
        for root, key in held[max(0, len(held) - room) :]:
            self._enqueue(root, [key])
        self._hurry.set()
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d blocks were not stored in time", len(self._queue))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            await self._settle()
            while self._queue:
                if self._link.caches.available:
                    await self._store(*self._next())
                else:
                    await asyncio.sleep(AWAY_S)
            self._news.clear()
            self._hurry.clear()
            self._idle.set()

    async def _settle(self) -> None:
        """Let those who found the blocks start first, unless others wait for them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._hurry.wait()

    def _lacks(self, key: bytes) -> bool:
        """Whether a block is neither stored, for all one knows, nor about to be."""
        return key not in self._link.known and key not in self._waiting

    def _unstored(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if self._lacks(key)]

    def _enqueue(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """What is not to be stored yet of `keys`, as far as there is room."""
        new = list(dict.fromkeys(self._unstored(keys)))  # choices of one request share their first blocks
        taken = new[: max(0, self._queue_blocks - len(self._queue))]
        self._waiting.update(taken)
        self._queue.extend((namespace, key) for key in taken)
        if len(taken) < len(new):
            self._link.metrics.blocks("dropped", len(new) - len(taken))
        if taken:
            self._idle.clear()
            self._news.set()

    def _next(self) -> tuple[bytes, list[bytes]]:
        """The queue's first blocks, all of one namespace."""
        namespace = self._queue[0][0]
        keys: list[bytes] = []
        while self._queue and self._queue[0][0] == namespace and len(keys) < PUT_BLOCKS:
            keys.append(self._queue.popleft()[1])
        return namespace, keys

    async def _store(self, namespace: bytes, keys: list[bytes]) -> None:
        sent: list[bytes] = []
        try:
            held = await self._link.caches.store(self._bundles(namespace, keys, sent))
        finally:
            self._waiting.difference_update(keys)
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
