"""Bundles in one Redis: one string each, visible whole or not at all. Every call ends in time, well or with RedisAway.

A call that was interrupted has its connection closed, never reused (redis-py does so for any interruption between
sending and reading; tests hold it to that): an answer can never reach another caller. Nothing is sent twice. There
are as many connections as calls at once; whoever calls bounds those.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from mesh.blocks import FORMAT_VERSION
from mesh.kv import KvGeometry

# The slowest way to Redis that is still of use; a call may take so much longer for what it carries.
BYTES_PER_S = 100 * 1024 * 1024
READ_SIZE_BYTES = 256 * 1024
# A ping is given more time than a call: our own busy event loop must not look like a dead Redis.
PING_S = 1.0

T = TypeVar("T")
Entry = bytes | None


class RedisAway(Exception):
    """Redis did not answer, or not as it should. `silent` = it did not answer at all."""

    def __init__(self, message: str, *, silent: bool = True) -> None:
        super().__init__(message)
        self.silent = silent


class RedisFull(Exception):
    """Redis takes no more: it is at its memory cap and may not evict."""


def storage_key(namespace: bytes, key: bytes, geometry: KvGeometry) -> bytes:
    """Where a block's bundle lies: all that its bytes depend on. No two meanings are spelled alike."""
    g = geometry
    shape = f"{g.dtype}:{g.block_tokens}:{g.layers}:{g.kv_heads}:{g.head_dim}"
    return f"shoal:kv:{FORMAT_VERSION}:{namespace.hex()}:{shape}:{key.hex()}".encode()


class RedisBundles:
    """The Redis at `url`. Entries are kept `ttl_s` after they were last written or read."""

    def __init__(self, url: str, timeout_s: float, ttl_s: float) -> None:
        self._timeout_s = timeout_s
        self._ttl_ms = round(ttl_s * 1000)
        self._redis = _client(url, timeout_s)
        self._pinged = _client(url, PING_S)

    async def aclose(self) -> None:
        """Close every connection."""
        for client in (self._redis, self._pinged):
            await client.aclose()
            await client.connection_pool.disconnect()

    async def ping(self) -> bool:
        """Whether Redis answers now."""
        try:
            async with asyncio.timeout(PING_S):
                await self._pinged.ping()
        except (RedisError, OSError, TimeoutError):
            return False
        return True

    async def exist(self, keys: list[bytes]) -> list[bool]:
        """Which of `keys` there are. Does not count as a use of them."""
        found = await self._pipelined([("EXISTS", key) for key in keys], 0)
        return [each == 1 for each in found]

    async def read(self, keys: list[bytes], entry_bytes: int) -> list[Entry]:
        """Entries of some `entry_bytes` each, None where there is none. What is read is kept longer."""
        commands = [("GETEX", key, "PX", self._ttl_ms) for key in keys]
        found = await self._pipelined(commands, len(keys) * entry_bytes)
        # Something else under our key (WRONGTYPE), or no string at all, is no entry; it reads as an empty one: damage.
        return [each if each is None or isinstance(each, bytes) else b"" for each in found]

    async def touch(self, key: bytes) -> bool:
        """Keep the entry longer; False if there is none."""
        return bool(await self._bounded(lambda: self._redis.pexpire(key, self._ttl_ms), 0))

    async def write(self, key: bytes, entry: bytes) -> None:
        """Store it. Raises RedisFull."""
        await self._bounded(lambda: self._redis.set(key, entry, px=self._ttl_ms), len(entry))

    async def remove(self, key: bytes) -> None:
        """Forget it, if it is there."""
        await self._bounded(lambda: self._redis.unlink(key), 0)

    async def _pipelined(self, commands: list[tuple[Any, ...]], size: int) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        found: list[Any] = await self._bounded(lambda: pipeline.execute(raise_on_error=False), size)
        for each in found:
            if isinstance(each, ResponseError) and not str(each).startswith("WRONGTYPE"):
                raise RedisAway(str(each), silent=False)
        return found

    async def _bounded(self, call: Callable[[], Awaitable[T]], size: int) -> T:
        """`call()`, which carries `size` bytes, within its time."""
        try:
            async with asyncio.timeout(self._timeout_s + size / BYTES_PER_S):
                return await call()
        except OutOfMemoryError as error:
            raise RedisFull(str(error)) from None
        except ResponseError as error:
            raise RedisAway(str(error), silent=False) from None
        except (RedisError, OSError, TimeoutError) as error:
            raise RedisAway(f"{type(error).__name__}: {error}") from error


def _client(url: str, timeout_s: float) -> "Redis":
    pool = ConnectionPool.from_url(
        url,
        socket_connect_timeout=timeout_s,
        socket_timeout=None,  # each call has its own time
        socket_read_size=READ_SIZE_BYTES,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis(connection_pool=pool)
