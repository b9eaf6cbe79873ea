"""Random numbers that are a pure function of (seed, choice, output position).

So chance does not depend on what shares a batch, and goes on alike after a preemption or on another worker.
"""

from functools import lru_cache

# More than ever run at once; one that was forgotten is computed again.
_REMEMBERED = 4096
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def bits(seed: int, choice: int, position: int) -> int:
    """64 random bits: SplitMix64's finalizer over the three counters in turn."""
    return _mix((_stream(seed, choice) ^ position) + _GOLDEN & _MASK)


@lru_cache(_REMEMBERED)
def _stream(seed: int, choice: int) -> int:
    """What is the same at all positions of a choice."""
    state = 0
    for counter in (seed, choice):
        state = _mix((state ^ counter) + _GOLDEN & _MASK)
    return state


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1): the top 53 of the bits."""
    return (bits(seed, choice, position) >> 11) / (1 << 53)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
