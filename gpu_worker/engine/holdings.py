"""Which blocks each sequence holds: what it finds as it starts, what it gets as it grows, what it leaves behind.

A sequence that starts finds, in this order, whole blocks by their chain keys; what was swapped out as it gave way; or
the beginning of one more block (openings.py), which it copies unless nobody else reads it. That copy is the
copy-on-write of n > 1: choices hold the prompt's blocks together, and each has its own of the block that it writes in.
So a block with a second holder, or one that can be found, is never written where another may read.

Copies are made at once, between two steps: what a step computes comes after them. Decides neither who runs nor who
gives way (schedule.py, preemption.py): where the pool has no block left, it says so.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.engine.api import Plan
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.sequence import Sequence, Swapped, blocks_for
from gpu_worker.engine.swap import HostBuffer
from gpu_worker.engine.transfer import BlockStore
from mesh.blocks import BLOCK_TOKENS

# Values of shoal.types.v1.KvTier.
DEVICE_TIER, SHARED_TIER = 1, 4


@dataclass(slots=True)
class Counts:
    """Since the engine started."""

    partial_hits: int = 0  # beginnings of blocks that were found
    copied_blocks: int = 0  # of those, copied because others read them
    swapped_sequences: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class Rates(Protocol):
    """What the engine has measured of its own steps."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 = not yet known."""


@dataclass(frozen=True, slots=True)
class NothingMeasured:
    """Before there was a step."""

    prefill_tokens_per_s: float = 0.0


class Holdings:
    """The sequences' side of the pool. `store` is the blocks' content; None = they have none."""

    def __init__(self, pool: BlockPool, host: HostBuffer, store: BlockStore | None = None) -> None:
        self.pool = pool
        self.host = host
        self.counts = Counts()
        self.rates: Rates = NothingMeasured()
        self._store = store
        self._fresh: dict[int, None] = {}

    def take_fresh(self) -> list[int]:
        """Blocks handed out since the last call that hold whatever was in them before: to be cleared."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh)

    def fits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether all known ids find blocks beside what running sequences still need for theirs, and one more each."""
        keys = self._found(sequence)
        own = blocks_for(len(sequence.ids)) - len(keys) + self.pool.unheld(keys)
        others = sum([blocks_for(len(one.ids)) - len(one.blocks) + 1 for one in running])
        return own + others <= self.pool.available

    def start(self, sequence: Sequence) -> None:
        """Give a sequence all that is here of it. It must fit."""
        keys = self._found(sequence)
        sequence.blocks = self.pool.hold(keys)
        sequence.computed = len(keys) * BLOCK_TOKENS
        swapped, sequence.swapped = sequence.swapped, None
        if swapped is not None:
            self._swap_in(sequence, swapped)
        if sequence.computed == len(keys) * BLOCK_TOKENS:
            self._start_inside(sequence)
        request = sequence.request
        if not request.started and sequence.computed:
            request.cached = _tiers(request.plan, sequence.computed)
        request.started = True

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Blocks for `count` more tokens; False if the pool has no more to give. Those it got it keeps."""
        while len(sequence.blocks) < blocks_for(sequence.computed + count):
            block = self.pool.allocate()
            if block is None:
                return False
            sequence.blocks.append(block)
            self._fresh[block] = None
        return True

    def prove(self, sequence: Sequence) -> None:
        """A token was sampled, so all that is computed is sound: others may go on from any of it."""
        if not sequence.proven or sequence.described < sequence.computed // BLOCK_TOKENS:
            if not sequence.proven:
                self._describe_tail(sequence)
            sequence.proven = True
            self._describe(sequence)

    def condemn(self, sequence: Sequence) -> None:
        """What the sequence has computed may be bad: nobody shall find it."""
        self.pool.disown(sequence.blocks)
        sequence.proven = False

    def release(self, sequence: Sequence) -> None:
        """Let go of all that the sequence holds, on the device and beside it. What is sound can be found again."""
        if sequence.swapped is not None:
            self.host.drop(sequence.swapped.slots)
            sequence.swapped = None
        if sequence.proven:
            self._describe(sequence)
            self._describe_tail(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        sequence.proven, sequence.described = False, 0

    def swap_out(self, sequence: Sequence) -> bool:
        """Release, but with what nobody else keeps copied to the host; False, and nothing done, if it has no room."""
        kept = self.kept(sequence)
        own = sequence.blocks[kept : blocks_for(sequence.computed)]
        slots = self.host.save(own)
        if slots is None:
            return False
        swapped = Swapped(kept, slots, sequence.computed, sequence.proven)
        self.counts.swapped_sequences += 1
        self.counts.swapped_out_blocks += len(slots)
        self.release(sequence)
        sequence.swapped = swapped
        return True

    def kept(self, sequence: Sequence) -> int:
        """How many of the sequence's first blocks others hold too, so that they stay without it."""
        for count, block in enumerate(sequence.blocks):
            if self.pool.holders(block) == 1:
                return count
        return len(sequence.blocks)

    def private(self, sequence: Sequence) -> bool:
        """Whether there is a block that nobody else holds."""
        return any(self.pool.holders(block) == 1 for block in reversed(sequence.blocks))

    def unwritten(self, running: Iterable[Sequence]) -> int:
        """Slots of used blocks that no token has filled. Only blocks with one holder have such."""
        return sum([len(one.blocks) * BLOCK_TOKENS - one.computed for one in running])

    def _found(self, sequence: Sequence) -> list[bytes]:
        """Keys of its whole blocks that are here. At least the last known token is computed, for its logits."""
        keys = sequence.keys_up_to(len(sequence.ids) - 1)
        return keys[: self.pool.match(keys)]

    def _start_inside(self, sequence: Sequence) -> None:
        """Go on within the block that begins like what comes next, if there is one."""
        first = sequence.computed
        ids = sequence.ids[first : min(first + BLOCK_TOKENS, len(sequence.ids) - 1)]
        block, tokens = self.pool.nearest(sequence.parent_of(len(sequence.blocks)), ids)
        if not tokens:
            return
        self.pool.take(block)
        own = block if self.pool.writable(block, tokens) else self._copy(block)
        if own != block:
            self.pool.release([block])
        if own is not None:
            sequence.blocks.append(own)
            sequence.computed += tokens
            self.counts.partial_hits += 1

    def _copy(self, block: int) -> int | None:
        """A block of one's own with the same content; None if there is none to be had."""
        own = self.pool.allocate()
        if own is not None:
            if self._store is not None:
                self._store.copy_block(block, own)
            self._fresh.pop(own, None)
            self.counts.copied_blocks += 1
        return own

    def _swap_in(self, sequence: Sequence, swapped: Swapped) -> None:
        """Write back what the device no longer has. Useless if blocks before it have gone, or more is here by now."""
        here, needed = len(sequence.blocks), blocks_for(swapped.computed)
        if swapped.first <= here < needed:
            own = self._allocate(needed - here)
            slots = swapped.slots[here - swapped.first :][: len(own)]
            self.host.load(slots, own)
            sequence.blocks += own
            sequence.computed = min(swapped.computed, len(sequence.blocks) * BLOCK_TOKENS)
            sequence.proven = swapped.proven
            self.counts.swapped_in_blocks += len(own)
            for at, key in list(enumerate(sequence.keys_up_to(sequence.computed)))[here:]:
                self.pool.publish(sequence.blocks[at], key)
        self.host.drop(swapped.slots)

    def _allocate(self, count: int) -> list[int]:
        """As many blocks as there are, at most `count`, whose content is about to be replaced."""
        blocks: list[int] = []
        while len(blocks) < count and (block := self.pool.allocate()) is not None:
            self._fresh.pop(block, None)
            blocks.append(block)
        return blocks

    def _describe(self, sequence: Sequence) -> None:
        """The whole blocks computed since the last time can be found by how they begin."""
        whole = sequence.computed // BLOCK_TOKENS
        for at in range(sequence.described, whole):
            self._describe_block(sequence, at, BLOCK_TOKENS)
        sequence.described = whole

    def _describe_tail(self, sequence: Sequence) -> None:
        at, tokens = divmod(sequence.computed, BLOCK_TOKENS)
        if tokens:
            self._describe_block(sequence, at, tokens)

    def _describe_block(self, sequence: Sequence, at: int, tokens: int) -> None:
        first = at * BLOCK_TOKENS
        self.pool.describe(sequence.blocks[at], sequence.parent_of(at), sequence.ids[first : first + tokens])


def _tiers(plan: Plan, found: int) -> dict[int, int]:
    """Prompt tokens among the first `found` tokens, by the tier that had them when the request came."""
    whole = min(found, len(plan.prompt_ids))
    first, last = (min(block * BLOCK_TOKENS, whole) for block in plan.fetched)
    tiers = {DEVICE_TIER: whole - (last - first), SHARED_TIER: last - first}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}
