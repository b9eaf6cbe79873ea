"""The worker's client and the service together: what one worker leaves, another finds, and trouble is a miss."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from mesh.clients.cache import CacheBudgets, Caches
from mesh.kv import KeySet

from .conftest import LARGE

PATIENT = CacheBudgets(match_s=20, stall_s=20, take_s=20, fetch_s=60, store_s=60)


@contextlib.asynccontextmanager
async def worker(port: int, eventually) -> AsyncIterator[tuple[Caches, Counter]]:
    told: Counter = Counter()
    caches = Caches(f"127.0.0.1:{port}", lambda operation, outcome: told.update([(operation, str(outcome))]), PATIENT)
    running = asyncio.create_task(caches.run())
    await eventually(lambda: caches.available)
    yield caches, told
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def fetched(caches: Caches, keys: KeySet) -> list[bytes]:
    return [bytes(bundle.payload) async for bundle in caches.fetch(keys)]


async def test_one_workers_blocks_are_anothers(running, make, keys, eventually) -> None:
    bundles = make(20, LARGE)
    async with worker(running.port, eventually) as (first, _), worker(running.port, eventually) as (second, told):
        assert await first.store(bundles) == 20
        assert await first.store(bundles[:5]) == 5
        assert await second.match(keys(bundles)) == 20
        assert await fetched(second, keys(bundles)) == [bundle.payload for bundle in bundles]
    assert told == {("match", "ok"): 1, ("fetch", "ok"): 1}


async def test_what_the_service_refuses_is_told_and_raises_nothing(serve, valkey, make, keys, eventually) -> None:
    bundles = make(2, LARGE)
    async with serve(valkey, max_bundle_bytes=1000) as running, worker(running.port, eventually) as (caches, told):
        assert await caches.store(bundles) == 0
        assert await caches.match(keys(bundles)) == 0
        assert await fetched(caches, keys(bundles)) == []
    assert told == {("store", "refused"): 1, ("match", "refused"): 1, ("fetch", "refused"): 1}


async def test_a_hung_redis_is_a_miss_to_a_worker_and_not_the_services_fault(
    serve, door, make, keys, eventually
) -> None:
    bundles = make(3)
    async with serve(door.url, timeout_s=0.5) as running, worker(running.port, eventually) as (caches, told):
        await eventually(lambda: caches.store(bundles))
        told.clear()
        door.shut()
        assert await caches.match(keys(bundles)) == 0
        assert await fetched(caches, keys(bundles)) == []
        assert await caches.store(bundles) == 0
        assert told == {("match", "miss"): 1, ("fetch", "miss"): 1, ("store", "miss"): 1}
        assert caches.available
        door.open()
        await eventually(lambda: caches.match(keys(bundles)))
        found = await eventually(lambda: fetched(caches, keys(bundles)))
        assert found == [bundle.payload for bundle in bundles]
