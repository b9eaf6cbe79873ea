"""Which cached block goes first when somebody needs room. The policy sees block ids only and decides nothing else."""

from collections import OrderedDict
from typing import Protocol


class Eviction(Protocol):
    """Orders the cached blocks. The pool tells it of every block that becomes cached and of every one that leaves."""

    def add(self, block: int) -> None:
        """`block` became cached. Of blocks released together the last of a prefix is added first."""

    def remove(self, block: int) -> None:
        """`block` is in use again, or can no longer be found."""

    def pop(self) -> int:
        """Choose a block, forget it and return it. Called only while there is one."""

    def __len__(self) -> int: ...


class LeastRecentlyUsed:
    """Evicts what was released longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)
