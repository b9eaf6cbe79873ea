"""Which blocks begin with which tokens: how a prompt finds the part of a block that it shares with another.

Chain keys find whole blocks. Where two prompts part inside a block, or an answer ended there, the block's first tokens
are as good for both. One shared token pays: a block's copy is read and written once (0.1 ms for the 0.7 MB of a 135M
model in fp32 on a CPU), as clearing the new block would be, and a token's prefill takes several times as long there and
grows with the model as its blocks do. Entries are per block, so memory is bounded by the pool; a look-up reads no more
than the newest few blocks of the same parent and first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Of blocks that begin alike the newest are looked at: a system prompt may have been followed by thousands of questions.
NEWEST = 16


@dataclass(frozen=True, slots=True)
class Opening:
    """`ids`, at least one and at most a block's worth, stand at the beginning of a block that follows `parent`."""

    parent: bytes
    ids: tuple[int, ...]

    @property
    def group(self) -> tuple[bytes, int]:
        return self.parent, self.ids[0]


class Openings:
    """Blocks by what they begin with. Knows nothing of who holds them."""

    def __init__(self) -> None:
        self._of: dict[int, Opening] = {}
        self._groups: dict[tuple[bytes, int], dict[int, None]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, block: int) -> bool:
        return block in self._of

    def blocks(self) -> list[int]:
        """All blocks that have an entry."""
        return list(self._of)

    def length(self, block: int) -> int:
        """How many of the block's tokens others may find; 0 if none."""
        opening = self._of.get(block)
        return len(opening.ids) if opening is not None else 0

    def add(self, block: int, opening: Opening) -> bool:
        """Say what a block begins with, or that it holds more by now. False if another block offers all of it."""
        if block in self._of:
            self.remove(block)
        elif self.find(opening.parent, opening.ids)[1] == len(opening.ids):
            return False
        self._of[block] = opening
        self._groups.setdefault(opening.group, {})[block] = None
        return True

    def remove(self, block: int) -> None:
        """Forget the block, if it is known."""
        opening = self._of.pop(block, None)
        if opening is not None:
            group = self._groups[opening.group]
            del group[block]
            if not group:
                del self._groups[opening.group]

    def find(self, parent: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """The block after `parent` that begins like `ids` for the most tokens, and how many; (-1, 0) if none."""
        best, shared = -1, 0
        group = self._groups.get((parent, ids[0])) if ids else None
        for _, block in zip(range(NEWEST), reversed(group or {}), strict=False):
            tokens = _common(self._of[block].ids, ids)
            if tokens > shared:
                best, shared = block, tokens
                if shared == len(ids):
                    break
        return best, shared


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for count, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return count
    return min(len(one), len(other))
