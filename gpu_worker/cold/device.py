"""What the engine's device holds of KV and has room for, as of its last report."""

from collections.abc import Iterable, Sequence, Set

from gpu_worker.engine.api import EngineLoad, StepResult


class Device:
    """Told of every step, so that nobody has to ask the engine."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()  # that its prefix cache has
        self._load: EngineLoad | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def holds(self, keys: Iterable[bytes]) -> None:
        """The prefix cache has exactly `keys`."""
        self._keys = set(keys)

    def stepped(self, result: StepResult) -> None:
        """A step changed it."""
        self._keys.difference_update(result.blocks_evicted)
        self._keys.update(result.blocks_stored)
        self._load = result.load

    def leading(self, keys: Sequence[bytes], also: Set[bytes] = frozenset()) -> int:
        """How many of `keys`, from the first on, are here or in `also`."""
        for count, key in enumerate(keys):
            if key not in self._keys and key not in also:
                return count
        return len(keys)

    @property
    def room(self) -> int:
        """Blocks that no sequence holds."""
        return self._load.free_blocks + self._load.cached_blocks if self._load is not None else 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 = not known."""
        return self._load.prefill_tokens_per_s if self._load is not None else 0.0
