"""Which worker holds which prompt blocks, at which tier: an inverted index, and the leading run of a prompt on each.

A key's holders are one integer, a bit per worker, so that a prompt of b blocks costs O(b) dictionary look-ups for all
workers together. It is a hint: a worker that lost a block meanwhile computes it.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Tier(IntEnum):
    """Where KV lies, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class PrefixIndex:
    """Blocks by (tier, key). Workers are slots, small integers."""

    def __init__(self) -> None:
        self._holders: tuple[dict[bytes, int], ...] = tuple({} for _ in Tier)
        self._held: dict[int, tuple[set[bytes], ...]] = {}

    def __len__(self) -> int:
        return sum(len(holders) for holders in self._holders)

    def store(self, slot: int, tier: Tier, keys: Iterable[bytes]) -> None:
        """The worker now has these. Repeats are harmless."""
        holders = self._holders[tier]
        held = self._held.setdefault(slot, tuple(set() for _ in Tier))[tier]
        for key in keys:
            held.add(key)
            holders[key] = holders.get(key, 0) | 1 << slot

    def evict(self, slot: int, tier: Tier, keys: Iterable[bytes]) -> None:
        """The worker no longer has these. Unknown ones are ignored."""
        if slot in self._held:
            held = self._held[slot][tier]
            gone = held.intersection(keys)
            held -= gone
            self._drop(slot, tier, gone)

    def clear(self, slot: int) -> None:
        """Forget all of one worker's blocks."""
        for tier, keys in zip(Tier, self._held.pop(slot, ()), strict=False):
            self._drop(slot, tier, keys)

    def _drop(self, slot: int, tier: Tier, keys: Iterable[bytes]) -> None:
        holders = self._holders[tier]
        for key in keys:
            left = holders[key] & ~(1 << slot)
            if left:
                holders[key] = left
            else:
                del holders[key]

    def leading(self, keys: Sequence[bytes], slots: int) -> NDArray[np.float64]:
        """Leading blocks of the chain that each worker holds, counted at their nearest tier: [tier, slot].

        A block counts only while every block before it is there too, at whatever tier.
        """
        counts = np.zeros((len(Tier), slots))
        alive = sum(1 << slot for slot in self._held)
        masks: list[int] = []
        run = 0
        for key in keys:
            if not alive:
                break
            at: list[int] = []
            missing = alive
            for holders in self._holders:
                at.append(holders.get(key, 0) & missing)
                missing &= ~at[-1]
            if at != masks:
                _add_run(counts, masks, run)
                masks, run = at, 0
            run += 1
            alive &= ~missing
        _add_run(counts, masks, run)
        return counts


def _add_run(counts: NDArray[np.float64], masks: Sequence[int], run: int) -> None:
    """Add `run` blocks to each worker whose bit is set. Chains change hands rarely, so runs are few."""
    slots = counts.shape[1]
    for tier, mask in enumerate(masks):
        if mask:
            packed = np.frombuffer(mask.to_bytes(-(-slots // 8), "little"), np.uint8)
            counts[tier] += run * np.unpackbits(packed, count=slots, bitorder="little").astype(np.float64)
