"""The block pool alone: whatever is asked of it, every block is in exactly one state."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_worker.engine.kv import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class PoolMachine(RuleBasedStateMachine):
    """Sequences that allocate, publish, share and release in any order, against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.held: list[list[int]] = []
        self.known: set[bytes] = set()  # what the reports of changes say

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        blocks = [block for _ in range(count) if (block := self.pool.allocate()) is not None]
        for block in blocks:
            assert all(block not in other for other in self.held)
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), number=st.integers(0, 8))
    def publish(self, data, number):
        block = data.draw(st.sampled_from(sorted({block for blocks in self.held for block in blocks})))
        self.pool.publish(block, key(number))

    @rule(numbers=st.lists(st.integers(0, 8), max_size=3, unique=True))
    def share(self, numbers):
        keys = [key(number) for number in numbers]
        keys = keys[: self.pool.match(keys)]
        before = self.pool.available
        cost = self.pool.unheld(keys)
        self.held.append(self.pool.hold(keys))
        assert self.pool.available == before - cost

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def disown(self, data):
        blocks = data.draw(st.sampled_from([blocks for blocks in self.held if blocks]))
        self.pool.disown(blocks)

    @rule(numbers=st.lists(st.integers(0, 8), max_size=4, unique=True))
    def touch(self, numbers):
        before = self.pool.keys()
        self.pool.touch([key(number) for number in numbers])
        assert self.pool.keys() == before

    @rule()
    def report(self):
        stored, evicted = self.pool.take_changes()
        assert not self.known & set(stored)
        assert set(evicted) <= self.known
        self.known = (self.known | set(stored)) - set(evicted)
        assert self.known == set(self.pool.keys())

    @invariant()
    def every_block_has_one_state(self):
        self.pool.check()
        assert self.pool.free + self.pool.cached + self.pool.used == self.pool.total
        assert self.pool.used == len({block for blocks in self.held for block in blocks})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(count: int) -> tuple[BlockPool, list[int]]:
    pool = BlockPool(count)
    blocks = [pool.allocate() for _ in range(count)]
    for number, block in enumerate(blocks):
        pool.publish(block, key(number))
    return pool, blocks


def test_the_tail_of_a_released_prefix_is_evicted_before_its_head():
    pool, blocks = filled(3)
    pool.release(blocks)
    assert [pool.allocate() for _ in range(3)] == blocks[::-1]
    assert pool.allocate() is None


def test_what_was_used_again_is_evicted_last():
    pool, blocks = filled(3)
    pool.release(blocks)
    pool.release(pool.hold([key(2)]))
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_a_second_block_of_the_same_key_stays_private():
    pool = BlockPool(2)
    first, twin = pool.allocate(), pool.allocate()
    pool.publish(first, key(1))
    pool.publish(twin, key(1))
    pool.release([twin])
    assert (pool.free, pool.cached, pool.used) == (1, 0, 1)


def test_releasing_what_is_not_held_is_an_error():
    pool, blocks = filled(2)
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.release(blocks)
