"""Brings blocks of a prompt from the shared tier onto the device before the prompt is computed.

For one request: what the device lacks of it, whether asking is worth while (policy.py), how much the service holds,
and then block by block from the service to the engine until all are there or the time allowed is over. Whatever came
helps; whatever did not is computed. Two requests that want the same blocks fetch them once.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gpu_worker.cold.device import Device
from gpu_worker.cold.link import Link
from gpu_worker.cold.policy import ColdLimits, FetchRate, Missing, allowed_s, worth_fetching
from mesh.kv import Bundle, KeySet


@dataclass(slots=True)
class Lookup:
    """What came of one request's lookup. Blocks [first, last) are those that came for it."""

    outcome: str = ""  # a word of ColdMetrics; empty = nothing was looked up
    first: int = 0
    last: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A fetch under way."""

    loaded: set[bytes] = field(default_factory=set)
    refused: bool = False
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Reader:
    """Brings blocks for all requests; `bytes_in_flight` is the most between the service and the engine."""

    def __init__(self, link: Link, device: Device, limits: ColdLimits, bytes_in_flight: int) -> None:
        self._link = link
        self._device = device
        self._limits = limits
        self._slots = asyncio.Semaphore(max(1, bytes_in_flight // link.geometry.bundle_bytes))
        self._rate = FetchRate()
        self._flights: dict[bytes, _Flight] = {}

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Whether the device lacks enough of `keys` to look further. Cheap."""
        return len(keys) - self._device.leading(keys) >= self._limits.least_blocks

    async def bring(self, namespace: bytes, keys: Sequence[bytes], lookup: Lookup) -> None:
        """Fetch what is worth while of `keys`, a prompt's blocks in order, and say in `lookup` how it went."""
        began = time.monotonic()
        lookup.first = lookup.last = self._device.leading(keys)
        limit_s = self._limits.match_s + allowed_s(self._missing(len(keys) - lookup.first), self._limits)
        try:
            async with asyncio.timeout(limit_s):
                lookup.last = await self._others(keys, lookup.first)
                lookup.outcome = await self._own(namespace, keys, lookup)
        except TimeoutError:
            lookup.outcome = "late"
            if lookup.first == lookup.last:
                now = time.monotonic()
                self._rate.record(now - began, 0.0, 0, now)
        finally:
            lookup.seconds = time.monotonic() - began
            self._link.metrics.looked_up(lookup.outcome or "cancelled", lookup.seconds)

    async def _others(self, keys: Sequence[bytes], leading: int) -> int:
        """Wait for whoever fetches the next block already; how many leading blocks are here then."""
        while leading < len(keys) and (flight := self._flights.get(keys[leading])) is not None:
            await flight.landed.wait()
            leading = max(leading, self._device.leading(keys, flight.loaded))
        return leading

    async def _own(self, namespace: bytes, keys: Sequence[bytes], lookup: Lookup) -> str:
        first = lookup.last
        wanted = KeySet(namespace, tuple(keys[first:]), self._link.geometry)
        if len(wanted.keys) < self._limits.least_blocks:
            return "hit" if first > lookup.first else "few"
        if not self._worth(len(wanted.keys)):
            return "slow"
        flight = _Flight()
        self._flights |= dict.fromkeys(wanted.keys, flight)
        try:
            word = await self._fetch(wanted, keys[:first], flight, lookup)
        finally:
            flight.landed.set()
            for key in wanted.keys:
                if self._flights.get(key) is flight:
                    del self._flights[key]
        return word or ("hit" if lookup.last == len(keys) else "partial")

    async def _fetch(self, wanted: KeySet, parents: Sequence[bytes], flight: _Flight, lookup: Lookup) -> str:
        """Why nothing was fetched; empty if something was."""
        least = self._limits.least_blocks
        found = await self._link.caches.match(wanted) if self._link.caches.available else 0
        if not self._link.caches.available:
            return "away"
        self._link.known.discard(wanted.keys[found:])
        self._link.known.add(wanted.keys[:found])
        others = len(self._flights) - len(wanted.keys)
        room = self._device.room - len(parents) - others
        if found < least or room < least:
            return "miss" if found < least else "full"
        count = min(found, room)
        if not self._worth(count):
            return "slow"
        await self._link.exchange.touch(parents)
        await self._receive(wanted.first(count), flight, lookup)
        return ""

    async def _receive(self, wanted: KeySet, flight: _Flight, lookup: Lookup) -> None:
        """Each block goes on to the engine as it comes; done when the engine has answered for all of them."""
        began, first_s = time.monotonic(), 0.0
        answers: list[asyncio.Future[bytes]] = []
        try:
            async with aclosing(self._link.caches.fetch(wanted)) as bundles:
                async for bundle in bundles:
                    first_s = first_s or time.monotonic() - began
                    answers.append(await self._hand_over(bundle, flight))
                    lookup.last += 1
                    if flight.refused:
                        return
            if answers:
                await asyncio.wait(answers)
        finally:
            if answers:
                now = time.monotonic()
                size = (len(answers) - 1) * self._link.geometry.bundle_bytes
                self._rate.record(first_s, now - began - first_s, size, now)

    async def _hand_over(self, bundle: Bundle, flight: _Flight) -> "asyncio.Future[bytes]":
        """To the engine, when few enough bytes are on their way there."""
        await self._slots.acquire()

        def answered(answer: "asyncio.Future[bytes]") -> None:
            self._slots.release()
            taken = not answer.cancelled() and bool(answer.result())
            flight.refused = flight.refused or (not taken and bundle.key not in self._device)
            flight.loaded.add(bundle.key)
            self._link.metrics.blocks("fetched" if taken else "refused")
            self._link.metrics.moved("in", len(bundle.payload))

        try:
            answer = await self._link.exchange.load(bundle.key, bytes(bundle.payload))
        except asyncio.CancelledError:
            self._slots.release()
            raise
        answer.add_done_callback(answered)
        return answer

    def _missing(self, blocks: int) -> Missing:
        return Missing(blocks, self._link.geometry.bundle_bytes, self._device.prefill_tokens_per_s)

    def _worth(self, blocks: int) -> bool:
        return worth_fetching(self._missing(blocks), self._rate, self._limits, time.monotonic())
