"""Reserves a request's price in its tenant's bucket and settles it with the real one.

Buckets live in Redis, shared by all gateways. When Redis is absent or slow, serving goes on: each gateway keeps buckets
of its own by the same rules (so for that time N gateways may admit N times a tenant's rate), tells the log once, counts
every such call, and asks Redis again a second later.
"""

import asyncio
import logging
import math
import time
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter

from gateway.limits.bucket import Bucket, Clock, Rules, give, take
from gateway.limits.redis_buckets import BucketsUnavailable, RedisBuckets
from gateway.tenants import Tenant
from mesh.errors import InvalidRequest, QuotaExceeded

TIMEOUT_S = 0.05
# After a failure: how long Redis is left alone, so that a silent one delays one call in a second and not every call.
PAUSE_S = 1.0
# What requests did not use is gathered for so long and given back in one call: else every second call to Redis is one.
GATHER_S = 0.05
# Added to a wait: the refill's last fraction of a token may be lost in rounding.
MARGIN_S = 0.01

log = logging.getLogger("shoal.limits")


class LocalBuckets:
    """Buckets of this process alone, on its monotonic clock."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def take(self, tenant: str, rules: Rules, cost: float) -> float:
        """As RedisBuckets.take."""
        self._buckets[tenant], wait_s = take(self._buckets.get(tenant), rules, _clock(), cost)
        return wait_s

    def give(self, tenant: str, rules: Rules, amount: float) -> None:
        """As RedisBuckets.give."""
        self._buckets[tenant] = give(self._buckets.get(tenant), rules, _clock(), amount)


def _clock() -> Clock:
    now_us = time.monotonic_ns() // 1000
    return Clock("local", now_us, now_us)


class Limiter:
    """`async with Limiter(url) as limiter`. An empty url = buckets of this process only."""

    def __init__(
        self, url: str = "", *, timeout_s: float = TIMEOUT_S, registry: CollectorRegistry | None = None
    ) -> None:
        self._redis = RedisBuckets(url, timeout_s) if url else None
        self._local = LocalBuckets()
        self._settling = asyncio.TaskGroup()
        self._owed: dict[Tenant, float] = {}
        self._giving: dict[Tenant, asyncio.Task[None]] = {}  # what was owed and is on its way
        self._gathering = False
        self._down_until = -math.inf
        self._down = False
        registry = registry or CollectorRegistry()
        self._fallbacks = Counter(
            "shoal_gateway_limit_fallbacks", "Bucket calls answered by this process alone.", registry=registry
        )
        self._refusals = Counter(
            "shoal_gateway_limit_refusals", "Requests above their tenant's bucket.", ["tenant"], registry=registry
        )

    async def __aenter__(self) -> Self:
        await self._settling.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for settlements under way, each bounded by the call's timeout, whatever made us leave."""
        await self._settling.__aexit__(None, None, None)
        if self._redis is not None:
            await self._redis.close()

    async def reserve(self, tenant: Tenant, cost: float) -> "Reservation":
        """Charge `cost` token-equivalents. Raises QuotaExceeded, after whose `retry_after_s` the bucket covers it if
        nobody else asks; InvalidRequest if it never can, since then waiting would be bad advice.
        """
        if cost > tenant.capacity:
            raise InvalidRequest(
                f"this request may cost {cost:.0f} token-equivalents and {tenant.name}'s bucket holds"
                f" {tenant.capacity:.0f}: lower max_tokens or n, or shorten the prompt",
                field="max_tokens",
                code="quota_capacity",
            )
        shared, wait_s = await self._take(tenant, cost)
        if wait_s > 0:
            self._refusals.labels(tenant.name).inc()
            raise QuotaExceeded(
                f"{tenant.name}'s bucket does not cover this request now; it does in {math.ceil(wait_s)} s",
                retry_after_s=wait_s + MARGIN_S,
            )
        return Reservation(self, tenant, cost, shared)

    async def _take(self, tenant: Tenant, cost: float) -> tuple[bool, float]:
        """(whether the shared bucket answered, seconds to wait)."""
        if self._redis is not None and time.monotonic() >= self._down_until:
            try:
                wait_s = await self._redis.take(tenant.name, _rules(tenant), cost)
                if wait_s > 0 and (tenant in self._owed or tenant in self._giving):
                    await self._give_owed(self._redis, tenant)
                    wait_s = await self._redis.take(tenant.name, _rules(tenant), cost)
            except BucketsUnavailable as error:
                self._went_down(error)
            else:
                self._came_up()
                return True, wait_s
        if self._redis is not None:
            self._fallbacks.inc()
        return False, self._local.take(tenant.name, _rules(tenant), cost)

    async def give_back(self, tenant: Tenant, amount: float, shared: bool) -> None:
        """Return `amount` to the bucket it came from: within GATHER_S, or before this tenant would be refused here. A
        negative one is charged at once. Goes on when the caller is cancelled; never raises.

        What Redis cannot take then is left to the refill.
        """
        if not shared or self._redis is None:
            self._local.give(tenant.name, _rules(tenant), amount)
        elif amount < 0:
            await asyncio.shield(self._settling.create_task(self._give_to_redis(self._redis, tenant, amount)))
        else:
            self._owed[tenant] = self._owed.get(tenant, 0.0) + amount
            if not self._gathering:
                self._gathering = True
                self._settling.create_task(self._gather(self._redis))

    async def _gather(self, redis: RedisBuckets) -> None:
        await asyncio.sleep(GATHER_S)
        self._gathering = False
        for tenant in list(self._owed):
            await self._give_owed(redis, tenant)

    async def _give_owed(self, redis: RedisBuckets, tenant: Tenant) -> None:
        """Return when what was owed to `tenant` at this moment, or is on its way, is given. Goes on when cancelled."""
        for _ in range(2):  # what is on its way, then what has come since
            if tenant not in self._giving:
                if not (amount := self._owed.pop(tenant, 0.0)):
                    return
                self._giving[tenant] = self._settling.create_task(self._give_to_redis(redis, tenant, amount))
            await asyncio.shield(self._giving[tenant])

    async def _give_to_redis(self, redis: RedisBuckets, tenant: Tenant, amount: float) -> None:
        try:
            await redis.give(tenant.name, _rules(tenant), amount)
        except BucketsUnavailable as error:
            self._fallbacks.inc()
            self._went_down(error)
        finally:
            if self._giving.get(tenant) is asyncio.current_task():
                del self._giving[tenant]

    def _went_down(self, error: BucketsUnavailable) -> None:
        self._down_until = time.monotonic() + PAUSE_S
        if not self._down:
            self._down = True
            log.warning("the limiter's Redis does not answer (%s): this gateway counts alone until it does", error)

    def _came_up(self) -> None:
        if self._down:
            self._down = False
            log.info("the limiter's Redis answers again")


class Reservation:
    """A charge that waits for its real figure."""

    def __init__(self, limiter: Limiter, tenant: Tenant, cost: float, shared: bool) -> None:
        self.tenant = tenant
        self.cost = cost
        self._limiter = limiter
        self._shared = shared
        self._settled = False

    async def settle(self, actual: float) -> None:
        """Book `actual` token-equivalents instead; 0 gives all of it back. Only the first call counts."""
        if self._settled:
            return
        self._settled = True
        if (unused := self.cost - max(0.0, actual)) != 0:
            await self._limiter.give_back(self.tenant, unused, self._shared)


def _rules(tenant: Tenant) -> Rules:
    return Rules(tenant.capacity, tenant.refill_per_s)
