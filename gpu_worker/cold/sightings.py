"""Which blocks are worth storing: those that were seen before. Pure.

Reading, hashing and sending a block costs steps, and most prompts come once. So a block is counted when this worker
computes it, and again whenever a later request finds it here or makes it be computed anew. Only keys are remembered,
longer than the device holds the blocks themselves, and no more than a bound: the sight that is oldest goes.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MOST_KEYS = 65_536


class Sightings:
    """Counts sights of chain keys; a block is due at its `after`-th."""

    def __init__(self, after: int, most: int = MOST_KEYS) -> None:
        self._after = after
        self._most = most
        self._seen: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # key -> (namespace, times)

    def __len__(self) -> int:
        return len(self._seen)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        """(namespace, key) of all that are remembered, the oldest sight first."""
        return ((namespace, key) for key, (namespace, _) in self._seen.items())

    def see(self, namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """One more sight of each key: those that are due, in the order given."""
        seen, due = self._seen, []
        for key in keys:
            times = seen[key][1] + 1 if key in seen else 1
            seen[key] = (namespace, times)
            seen.move_to_end(key)
            if times >= self._after:
                due.append(key)
        while len(seen) > self._most:
            seen.popitem(last=False)
        return due

    def see_chain(self, namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """As `see`, of a prompt's blocks from its first on. A block is of no use without its parents, so all up to the
        last one that is due are, even those whose earlier sights are forgotten."""
        due = self.see(namespace, keys)
        return list(keys[: keys.index(due[-1]) + 1]) if due else []
