"""Buckets in Redis, shared by all gateways: one script call each, bounded in time, never sent twice.

A call that timed out or was cancelled may have been applied, so it is not retried; a charge it may have left behind is
small and flows back with the refill. Its connection is closed, not reused (redis-py does so on any interruption between
sending and reading; a test holds it to that), so an answer can never reach another caller.
"""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.limits.bucket import Rules

CONNECTIONS = 16
_SCRIPT = Path(__file__).with_name("bucket.lua")


class BucketsUnavailable(Exception):
    """Redis did not answer in time, or not as it should."""


class RedisBuckets:
    """The buckets at `url`. Every call ends within `timeout_s`, with BucketsUnavailable if Redis does not answer."""

    def __init__(self, url: str, timeout_s: float) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            decode_responses=True,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis: Redis = Redis(connection_pool=pool)
        self._script = self._redis.register_script(_SCRIPT.read_text(encoding="ascii"))
        self._timeout_s = timeout_s
        self._process = secrets.token_hex(8)
        self._seen_us: dict[str, int] = {}

    async def take(self, tenant: str, rules: Rules, cost: float) -> float:
        """Charge `cost`: 0, or the seconds until the bucket covers it."""
        return await self._call("take", tenant, rules, cost)

    async def give(self, tenant: str, rules: Rules, amount: float) -> None:
        """Return `amount`, or charge its negative, within the bucket's bounds."""
        await self._call("give", tenant, rules, amount)

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose(close_connection_pool=True)
        await self._redis.connection_pool.disconnect()

    async def _call(self, operation: str, tenant: str, rules: Rules, amount: float) -> float:
        mono_us = time.monotonic_ns() // 1000
        seen_us = self._seen_us.get(tenant, -1)
        numbers = (repr(amount), repr(rules.capacity), repr(rules.refill_per_s))
        try:
            async with asyncio.timeout(self._timeout_s):
                reply: Any = await self._script(
                    keys=[f"shoal:limit:{{{tenant}}}"], args=[operation, *numbers, self._process, mono_us, seen_us]
                )
            _level, wait_s, _wall_us = map(float, reply)
        except (RedisError, OSError, TimeoutError, ValueError, TypeError) as error:
            raise BucketsUnavailable(f"{type(error).__name__}: {error}") from error
        self._seen_us[tenant] = max(mono_us, self._seen_us.get(tenant, -1))
        return wait_s
