"""Whole blocks in and out of the pool, between steps: what the colder tiers of KV are filled from and read into.

A block that comes in is cached at once, held by nobody: a sequence that starts later finds it like any other, and
whoever needs room before that evicts it. So nothing is ever taken from what runs, and what may be promised stays.
"""

from collections.abc import Sequence
from typing import Protocol

from gpu_worker.engine.kv import BlockPool


class BlockStore(Protocol):
    """The blocks' content, by id."""

    block_bytes: int

    def read_block(self, block: int) -> memoryview:
        """All bytes of a block. Valid until the block changes."""

    def write_block(self, block: int, payload: bytes | bytearray | memoryview) -> None:
        """Replace a block by `payload` of block_bytes."""

    def copy_block(self, source: int, target: int) -> None:
        """Make a block equal to another, byte for byte, on the device."""


class Transfer:
    """Moves blocks by their chain keys. `store` None = the content is nothing that another engine could use."""

    def __init__(self, pool: BlockPool, store: BlockStore | None) -> None:
        self._pool = pool
        self._store = store

    def touch(self, keys: Sequence[bytes]) -> None:
        """Of those that are here, evict none before older ones: what is loaded next continues them."""
        self._pool.touch(keys)

    def load(self, key: bytes, payload: bytes | bytearray | memoryview) -> bool:
        """Make `payload` findable under `key`; False if it is the wrong size, here already, or every block is used."""
        if self._store is None or len(payload) != self._store.block_bytes or key in self._pool:
            return False
        block = self._pool.allocate()
        if block is None:
            return False
        try:
            self._store.write_block(block, payload)
            self._pool.publish(block, key)
        finally:
            self._pool.release([block])
        return True

    def dump(self, key: bytes) -> memoryview | None:
        """The block's bytes, valid until the next step; None if it is not here."""
        block = self._pool.block_of(key)
        return self._store.read_block(block) if self._store is not None and block is not None else None
