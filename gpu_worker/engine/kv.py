"""Who holds which KV block: allocation, reference counts and the prefix cache. No tensors here.

A block is in exactly one of three states:

    free    holds nothing
    used    at least one sequence holds it (`_holders` > 0)
    cached  nobody holds it, but it can be found: by its chain key, or by the tokens that it begins with

so free + cached + used = total by construction; the counts are the containers' own sizes, never kept beside them.
A block becomes findable (`publish`, `describe`) while it is still used, and cached when its last holder releases it.
Nobody writes where another may read: `writable` says where a holder may.
"""

from collections.abc import Iterable, Sequence

from gpu_worker.engine.eviction import Eviction, LeastRecentlyUsed
from gpu_worker.engine.openings import Opening, Openings


class BlockPool:
    """The blocks of one device. Sequences hold blocks by id; equal prefixes hold the same ones."""

    def __init__(self, total: int, eviction: Eviction | None = None) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders: dict[int, int] = {}  # used block -> how many sequences hold it
        self._cached: Eviction = eviction if eviction is not None else LeastRecentlyUsed()
        self._block_of: dict[bytes, int] = {}  # chain key -> block, used or cached
        self._key_of: dict[int, bytes] = {}
        self._openings = Openings()  # what used and cached blocks begin with
        self._stored: dict[bytes, None] = {}  # since the last take_changes, in order
        self._evicted: dict[bytes, None] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return len(self._holders)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def keys(self) -> list[bytes]:
        """Chain keys of all blocks that have one."""
        return list(self._block_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._block_of

    def block_of(self, key: bytes) -> int | None:
        """The block of `key`."""
        return self._block_of.get(key)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are here. Changes nothing."""
        for count, key in enumerate(keys):
            if key not in self._block_of:
                return count
        return len(keys)

    def unheld(self, keys: Sequence[bytes]) -> int:
        """How many blocks of `keys`, all here, nobody holds yet: holding them takes that much from `available`."""
        return sum(self._block_of[key] not in self._holders for key in keys)

    def hold(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of `keys`, each held once more. Every key must be here (`match`)."""
        blocks = [self._block_of[key] for key in keys]
        for block in blocks:
            self.take(block)
        return blocks

    def take(self, block: int) -> None:
        """Hold a block that was found, used or cached, once more."""
        if block not in self._holders:
            self._cached.remove(block)
        self._holders[block] = self._holders.get(block, 0) + 1

    def holders(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._holders.get(block, 0)

    def writable(self, block: int, offset: int) -> bool:
        """Whether the one who holds the block may write its tokens from `offset` on: nobody else reads them."""
        unseen = block not in self._key_of and self._openings.length(block) <= offset
        return unseen and self._holders[block] == 1

    def allocate(self) -> int | None:
        """A block of one's own, evicting a cached one if none is free; None if every block is used."""
        if not self._free:
            if not len(self._cached):
                return None
            block = self._cached.pop()
            self._forget(block)
            self._free.append(block)
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> bool:
        """Make a used, fully computed block findable. False = a twin, which stays private."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        if key in self._evicted:
            del self._evicted[key]
        else:
            self._stored[key] = None
        return True

    def describe(self, block: int, parent: bytes, ids: Sequence[int]) -> bool:
        """Make the beginning of a used block findable: `ids` after `parent`. False if another block offers the same."""
        return self._openings.add(block, Opening(parent, tuple(ids)))

    def nearest(self, parent: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """The block that begins like `ids` after `parent` for the most tokens, and how many; (-1, 0) if none."""
        return self._openings.find(parent, ids)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The cached ones among `keys`, a prefix in order, count as released just now, the last of them first."""
        for key in reversed(keys):
            block = self._block_of.get(key)
            if block is not None and block not in self._holders:
                self._cached.remove(block)
                self._cached.add(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, given in the sequence's order. The last of a prefix is evicted before its parents."""
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders:
                self._holders[block] = holders
                continue
            del self._holders[block]
            if block in self._key_of or block in self._openings:
                self._cached.add(block)
            else:
                self._free.append(block)

    def disown(self, blocks: Iterable[int]) -> None:
        """Used blocks whose content may be bad: nobody shall find them again."""
        for block in blocks:
            self._forget(block)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys (gained, lost) since the last call; one that came and went is in neither."""
        changes = list(self._stored), list(self._evicted)
        self._stored, self._evicted = {}, {}
        return changes

    def _forget(self, block: int) -> None:
        self._openings.remove(block)
        key = self._key_of.pop(block, None)
        if key is None:
            return
        del self._block_of[key]
        if key in self._stored:
            del self._stored[key]
        else:
            self._evicted[key] = None

    def check(self) -> None:
        """Raise AssertionError if the three states do not partition the pool. For tests."""
        free, used = set(self._free), set(self._holders)
        cached = (set(self._key_of) | set(self._openings.blocks())) - used
        whole = len(free) == len(self._free) and not (free & used) and not (cached & (free | used))
        if not whole or free | used | cached != set(range(self.total)) or len(cached) != len(self._cached):
            raise AssertionError(f"pool of {self.total}: {len(free)} free, {len(cached)} cached, {len(used)} used")
        if min(self._holders.values(), default=1) < 1:
            raise AssertionError("a used block without a holder")
