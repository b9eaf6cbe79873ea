"""Keys that the shared tier is believed to hold, so that nothing is stored twice. Bounded: the oldest go."""

from collections import OrderedDict
from collections.abc import Iterable

MOST_KEYS = 65_536


class Known:
    """A set of chain keys in order of the last good news of each."""

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[bytes]) -> None:
        """The shared tier holds them."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """It does not say so any more."""
        for key in keys:
            self._keys.pop(key, None)
