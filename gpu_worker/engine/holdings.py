"""Which blocks each sequence holds: what it finds as it starts, what it gets as it grows, what it loses as it leaves.

Decides neither who runs nor who gives way (schedule.py, preemption.py): where the pool has no block left, it says so.
"""

from collections.abc import Iterable

from gpu_worker.engine.api import Plan
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.sequence import Sequence, blocks_for
from mesh.blocks import BLOCK_TOKENS

# Values of shoal.types.v1.KvTier.
DEVICE_TIER, SHARED_TIER = 1, 4


class Holdings:
    """The sequences' side of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.fresh: list[int] = []  # blocks allocated for the step being planned, to be cleared

    def fits(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether all known ids find blocks beside what running sequences still need for theirs, and one more each."""
        keys = _findable(sequence)
        keys = keys[: self.pool.match(keys)]
        own = blocks_for(len(sequence.ids)) - len(keys) + self.pool.unheld(keys)
        others = sum(blocks_for(len(one.ids)) - len(one.blocks) + 1 for one in running)
        return own + others <= self.pool.available

    def start(self, sequence: Sequence) -> None:
        """Give a sequence what the prefix cache has of it."""
        keys = _findable(sequence)
        sequence.blocks = self.pool.hold(keys[: self.pool.match(keys)])
        sequence.computed = len(sequence.blocks) * BLOCK_TOKENS
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
            self.fresh.append(block)
        return True

    def release(self, sequence: Sequence) -> None:
        """Let go of all that the sequence holds."""
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0


def _tiers(plan: Plan, found: int) -> dict[int, int]:
    """Prompt tokens among the first `found` tokens, by the tier that had them when the request came."""
    whole = min(found, len(plan.prompt_ids))
    first, last = (min(block * BLOCK_TOKENS, whole) for block in plan.fetched)
    tiers = {DEVICE_TIER: whole - (last - first), SHARED_TIER: last - first}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}


def _findable(sequence: Sequence) -> list[bytes]:
    """Keys worth looking up: at least the last known token is computed, for its logits."""
    return sequence.keys_up_to(len(sequence.ids) - 1)
