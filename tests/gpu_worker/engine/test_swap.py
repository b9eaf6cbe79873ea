"""Host memory for blocks: bounded, exact, and timed."""

import pytest
import torch

from gpu_worker.engine.swap import HostBuffer
from gpu_worker.models.paged import KvShape, PagedKv


def kv(blocks: int) -> PagedKv:
    made = PagedKv(KvShape(2, 1, 4, 1), blocks, torch.device("cpu"), torch.float32)
    for block in range(blocks):
        made.write_block(block, bytes([block + 1]) * made.block_bytes)
    return made


def test_blocks_come_back_as_they_were_and_into_others():
    store = kv(6)
    host = HostBuffer(4 * store.block_bytes, store.block_bytes, store)
    slots = host.save([1, 3])
    store.clear([1, 3])
    host.load(slots, [4, 5])
    assert bytes(store.read_block(4)) == bytes([2]) * store.block_bytes
    assert bytes(store.read_block(5)) == bytes([4]) * store.block_bytes
    assert host.bytes_per_s > 0


def test_it_holds_no_more_than_it_was_given_and_takes_all_or_nothing():
    store = kv(6)
    host = HostBuffer(3 * store.block_bytes + store.block_bytes // 2, store.block_bytes, store)
    assert (host.total, host.used) == (3, 0)
    first = host.save([0, 1])
    assert host.save([2, 3]) is None
    assert (host.used, host.free) == (2, 1)
    last = host.save([4])
    assert host.save([5]) is None
    host.drop(first)
    assert sorted(host.save([2, 3]) + last) == [0, 1, 2]
    assert host.save([5]) is None


@pytest.mark.parametrize("content", [True, False])
def test_no_room_at_all_means_that_nothing_is_swapped(content):
    store = kv(2)
    host = HostBuffer(0, store.block_bytes, store if content else None)
    assert host.save([0]) is None
    assert host.used == 0


def test_where_blocks_have_no_content_room_is_counted_all_the_same():
    host = HostBuffer(2000, 1000)
    slots = host.save([7, 8])
    host.load(slots, [1, 2])
    assert (host.used, host.free, host.bytes_per_s) == (2, 0, 0.0)
    host.drop(slots)
    assert host.used == 0


def test_the_rate_is_of_what_was_copied():
    store, times = kv(4), iter([0.0, 2.0, 10.0, 11.0])
    host = HostBuffer(1 << 20, store.block_bytes, store, clock=lambda: next(times))
    slots = host.save([0, 1])
    assert host.bytes_per_s == pytest.approx(store.block_bytes)
    host.load(slots, [2, 3])
    assert host.bytes_per_s == pytest.approx(1.25 * store.block_bytes)
