"""The cold store: what may be asked of Redis, how much at once, and what an unwell Redis means: a miss.

Memory is bounded twice, for what is being received and for what is being sent; connections by their number. While Redis
does not answer, nothing is sent to it but a ping now and then: calls are answered at once, as if nothing were held.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum

from cache_service.budget import Budget
from cache_service.limits import Limits
from cache_service.metrics import Metrics
from cache_service.redis_bundles import RedisAway, RedisBundles, RedisFull, storage_key
from cache_service.translate import Damaged, bundle_of, entry_of
from mesh.breaker import Breaker, BreakerPolicy
from mesh.kv import Bundle, KeySet

# Keys in one pipeline of EXISTS: a first gap wastes at most so many.
MATCH_KEYS = 128
# Read for one Get before it is sent, unless one bundle is larger.
READ_AHEAD_BYTES = 4 * 1024 * 1024
READ_AHEAD_KEYS = 64
PING_EVERY_S = 0.5
BREAKER = BreakerPolicy(failures=3, open_s=0.5, open_most_s=5.0)

log = logging.getLogger("shoal.cache")


class Written(StrEnum):
    """What became of a bundle."""

    STORED = "stored"
    HELD = "held"
    REFUSED = "refused"


class ColdStore:
    """Bundles behind `redis`. Nothing here raises for Redis' sake."""

    def __init__(self, redis: RedisBundles, limits: Limits, metrics: Metrics) -> None:
        self.receiving = Budget(limits.held_bytes, limits.room_s)
        self.sending = Budget(limits.held_bytes, limits.room_s)
        self.puts = Budget(limits.puts, limits.room_s, "calls of Put")
        metrics.held("received", lambda: self.receiving.held)
        metrics.held("sent", lambda: self.sending.held)
        self._redis = redis
        self._metrics = metrics
        self._breaker = Breaker(BREAKER)
        self._answers = False
        self._connections = asyncio.Semaphore(limits.connections)

    async def watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Until cancelled: ping Redis, and tell of every change between answering and not."""
        told: bool | None = None
        while True:
            well = await self._redis.ping()
            self._pinged(well, time.monotonic())
            if well != told:
                told = well
                level, event, message = _NEWS[well]
                log.log(level, message, extra={"fields": {"event": event}})
                self._metrics.redis_up(well)
                await tell(well)
            await asyncio.sleep(PING_EVERY_S)

    def _pinged(self, well: bool, now: float) -> None:
        # After silence the first answer opens the way; after trouble with calls alone, an answer when it is due.
        if well and not self._breaker.closed and (not self._answers or now >= self._breaker.probe_at_s):
            self._breaker.probed(True, now)
        self._answers = well

    async def leading(self, keys: KeySet) -> int:
        """How many leading keys are held."""
        places = _places(keys)
        leading = 0
        try:
            for start in range(0, len(places), MATCH_KEYS):
                async with self._asking("match"):
                    found = await self._redis.exist(places[start : start + MATCH_KEYS])
                if False in found:
                    return leading + found.index(False)
                leading += len(found)
        except RedisAway:
            return 0
        return leading

    async def read(self, keys: KeySet) -> AsyncGenerator[Bundle, None]:
        """Bundles in the order of `keys` until the first miss. Reads on when the last of a batch was taken.

        Raises Overloaded when too much is being sent already.
        """
        size = keys.geometry.bundle_bytes
        step = max(1, min(READ_AHEAD_KEYS, READ_AHEAD_BYTES // size))
        places = _places(keys)
        for start in range(0, len(places), step):
            batch = places[start : start + step]
            async with self.sending.hold(len(batch) * size):
                entries = await self._read(batch, size)
                for index, entry in enumerate(entries, start):
                    bundle = await self._bundle(entry, keys, index, places[index])
                    if bundle is None:
                        return
                    yield bundle
                if len(entries) < len(batch):
                    return

    async def write(self, bundle: Bundle) -> Written:
        """Store it, unless it is held: then it is kept longer."""
        place = storage_key(bundle.namespace, bundle.key, bundle.geometry)
        try:
            async with self._asking("store"):
                if await self._redis.touch(place):
                    return Written.HELD
                await self._redis.write(place, entry_of(bundle))
        except RedisAway:
            self._metrics.refused("redis_away")
            return Written.REFUSED
        except RedisFull:
            self._metrics.refused("redis_full")
            return Written.REFUSED
        return Written.STORED

    async def _read(self, places: list[bytes], size: int) -> list[bytes]:
        """Entries up to the first that is not there."""
        try:
            async with self._asking("fetch"):
                found = await self._redis.read(places, size)
        except RedisAway:
            return []
        entries = []
        for entry in found:
            if entry is None:
                break
            entries.append(entry)
        return entries

    async def _bundle(self, entry: bytes, keys: KeySet, index: int, place: bytes) -> Bundle | None:
        try:
            return bundle_of(entry, keys, index)
        except Damaged as damage:
            log.warning("an entry is not what its key says: %s", damage, extra={"fields": {"key": place.decode()}})
            self._metrics.mismatch()
        await self._remove(place)
        return None

    async def _remove(self, place: bytes) -> None:
        """Of a damaged entry, which would stand in the way of a good one."""
        with suppress(RedisAway):
            async with self._asking("remove"):
                await self._redis.remove(place)

    @asynccontextmanager
    async def _asking(self, kind: str) -> AsyncIterator[None]:
        """Around one exchange with Redis. Raises RedisAway, at once while it is known to be."""
        async with self._connections:
            if not (self._answers and self._breaker.closed):
                raise RedisAway("it is left alone until it answers a ping")
            try:
                yield
            except RedisAway as away:
                self._metrics.redis_failed(kind)
                log.debug("redis: %s: %s", kind, away)
                self._breaker.failed(kind, time.monotonic(), at_once=away.silent)
                raise
            self._breaker.succeeded(kind)


_NEWS = {
    True: (logging.INFO, "redis_up", "redis answers"),
    False: (logging.WARNING, "redis_away", "redis does not answer: until it does, all is a miss"),
}


def _places(keys: KeySet) -> list[bytes]:
    return [storage_key(keys.namespace, key, keys.geometry) for key in keys.keys]
