"""Host memory for the KV of sequences that gave way: bounded, counted in blocks, and timed as it is used.

Holds bytes, not meaning: which block belongs to whom is the holder's affair (holdings.py). Where blocks have no content
(the simulated engine) room and counts are kept the same and nothing is copied.
"""

import mmap
import time
from collections.abc import Callable, Sequence

from gpu_worker.engine.transfer import BlockStore

SMOOTHING = 0.25  # weight of the newest copy in the rate


class HostBuffer:
    """Slots of one block each. Memory is taken as slots are first used, and never more than `capacity_bytes`."""

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        store: BlockStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.block_bytes = block_bytes
        self.total = capacity_bytes // block_bytes
        self._store = store
        self._clock = clock
        self._returned: list[int] = []
        self._touched = 0  # slots that were ever used: [0, touched)
        self._memory: memoryview | None = None
        self.bytes_per_s = 0.0  # of copies in either direction; 0 = not yet known

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def used(self) -> int:
        return self._touched - len(self._returned)

    def save(self, blocks: Sequence[int]) -> list[int] | None:
        """Copy blocks into slots; None if there are not enough."""
        if len(blocks) > self.free:
            return None
        slots = [self._slot() for _ in blocks]
        if self._store is not None:
            began_s = self._clock()
            for slot, block in zip(slots, blocks, strict=True):
                self._room(slot)[:] = self._store.read_block(block)
            self._timed(len(blocks), self._clock() - began_s)
        return slots

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots back into blocks. The slots stay taken."""
        if self._store is not None and slots:
            began_s = self._clock()
            for slot, block in zip(slots, blocks, strict=True):
                self._store.write_block(block, self._room(slot))
            self._timed(len(blocks), self._clock() - began_s)

    def drop(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        self._returned += slots

    def _slot(self) -> int:
        if self._returned:
            return self._returned.pop()
        self._touched += 1
        return self._touched - 1

    def _room(self, slot: int) -> memoryview:
        if self._memory is None:
            # Anonymous and private: pages that were never written cost nothing.
            size = self.total * self.block_bytes
            self._memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def _timed(self, blocks: int, seconds: float) -> None:
        rate = blocks * self.block_bytes / max(seconds, 1e-9)
        self.bytes_per_s += (SMOOTHING if self.bytes_per_s else 1.0) * (rate - self.bytes_per_s)
