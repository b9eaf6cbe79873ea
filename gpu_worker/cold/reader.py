"""Brings blocks of a prompt from the shared tier onto the device before the prompt is computed.

For one request: what the device lacks of it, whether asking is worth while (policy.py), how much the service holds,
and then block by block from the service to the engine until all are there or the time allowed is over. Whatever came
helps; whatever did not is computed. Two requests that want the same blocks fetch them once.
"""

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from contextlib import aclosing
from dataclasses import dataclass, field

from gpu_worker.cold.exchange import Exchange
from gpu_worker.cold.known import Known
from gpu_worker.cold.metrics import ColdMetrics
from gpu_worker.cold.policy import ColdLimits, FetchRate, Missing, allowed_s, worth_fetching
from gpu_worker.engine.api import EngineLoad
from mesh.clients.cache import Caches
from mesh.kv import Bundle, KeySet, KvGeometry


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
    """`device` is the keys that the device has, as of the engine's last report; `load` its last load."""

    def __init__(
        self,
        caches: Caches,
        exchange: Exchange,
        geometry: KvGeometry,
        limits: ColdLimits,
        known: Known,
        metrics: ColdMetrics,
        *,
        device: Set[bytes],
        load: Callable[[], EngineLoad | None],
        bytes_in_flight: int,
    ) -> None:
        self._caches = caches
        self._exchange = exchange
        self._geometry = geometry
        self._limits = limits
        self._known = known
        self._metrics = metrics
        self._device = device
        self._load = load
        self._slots = asyncio.Semaphore(max(1, bytes_in_flight // geometry.bundle_bytes))
        self._rate = FetchRate()
        self._flights: dict[bytes, _Flight] = {}

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Whether the device lacks enough of `keys` to look further. Cheap."""
        return len(keys) - self._leading(keys, set()) >= self._limits.least_blocks

    async def bring(self, namespace: bytes, keys: Sequence[bytes], lookup: Lookup) -> None:
        """Fetch what is worth while of `keys`, a prompt's blocks in order, and say in `lookup` how it went."""
        began = time.monotonic()
        lookup.first = lookup.last = self._leading(keys, set())
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
            self._metrics.looked_up(lookup.outcome or "cancelled", lookup.seconds)

    async def _others(self, keys: Sequence[bytes], leading: int) -> int:
        """Wait for whoever fetches the next block already; how many leading blocks are here then."""
        while leading < len(keys) and (flight := self._flights.get(keys[leading])) is not None:
            await flight.landed.wait()
            leading = max(leading, self._leading(keys, flight.loaded))
        return leading

    async def _own(self, namespace: bytes, keys: Sequence[bytes], lookup: Lookup) -> str:
        first = lookup.last
        wanted = KeySet(namespace, tuple(keys[first:]), self._geometry)
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
        found = await self._caches.match(wanted) if self._caches.available else 0
        if not self._caches.available:
            return "away"
        self._known.discard(wanted.keys[found:])
        self._known.add(wanted.keys[:found])
        others = len(self._flights) - len(wanted.keys)
        room = self._room() - len(parents) - others
        if found < least or room < least:
            return "miss" if found < least else "full"
        count = min(found, room)
        if not self._worth(count):
            return "slow"
        await self._exchange.touch(parents)
        await self._receive(wanted.first(count), flight, lookup)
        return ""

    async def _receive(self, wanted: KeySet, flight: _Flight, lookup: Lookup) -> None:
        """Each block goes on to the engine as it comes; done when the engine has answered for all of them."""
        began, first_s = time.monotonic(), 0.0
        answers: list[asyncio.Future[bytes]] = []
        try:
            async with aclosing(self._caches.fetch(wanted)) as bundles:
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
                size = (len(answers) - 1) * self._geometry.bundle_bytes
                self._rate.record(first_s, now - began - first_s, size, now)

    async def _hand_over(self, bundle: Bundle, flight: _Flight) -> "asyncio.Future[bytes]":
        """To the engine, when few enough bytes are on their way there."""
        await self._slots.acquire()

        def answered(answer: "asyncio.Future[bytes]") -> None:
            self._slots.release()
            taken = not answer.cancelled() and bool(answer.result())
            flight.refused = flight.refused or (not taken and bundle.key not in self._device)
            flight.loaded.add(bundle.key)
            self._metrics.blocks("fetched" if taken else "refused")
            self._metrics.moved("in", len(bundle.payload))

        try:
            answer = await self._exchange.load(bundle.key, bytes(bundle.payload))
        except asyncio.CancelledError:
            self._slots.release()
            raise
        answer.add_done_callback(answered)
        return answer

    def _leading(self, keys: Sequence[bytes], also: Set[bytes]) -> int:
        for count, key in enumerate(keys):
            if key not in self._device and key not in also:
                return count
        return len(keys)

    def _missing(self, blocks: int) -> Missing:
        load = self._load()
        rate = load.prefill_tokens_per_s if load is not None else 0.0
        return Missing(blocks, self._geometry.bundle_bytes, rate)

    def _worth(self, blocks: int) -> bool:
        return worth_fetching(self._missing(blocks), self._rate, self._limits, time.monotonic())

    def _room(self) -> int:
        """Blocks that no sequence holds."""
        load = self._load()
        return load.free_blocks + load.cached_blocks if load is not None else 0
