"""Fetch or recompute: decided for each request from what was measured on this worker. Pure; the clock comes in.

    recomputing  missing tokens / the engine's prefill rate
    fetching     latency + missing bytes / rate, both moving averages of this worker's own fetches

A fetch is tried where either is unknown, which a measurement becomes with age: a cache that was slow once is asked
again. However well it looks, it may take only a share of the time that recomputing would, so the worst that a first
token can suffer is that share.
"""

from dataclasses import dataclass, field

from mesh.blocks import BLOCK_TOKENS

# Weight of the newest fetch in what is typical.
SMOOTHING = 0.3
# Without a fetch for so long, seconds, what is known of them is no longer.
FORGET_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdLimits:
    """What a user may set of it."""

    least_blocks: int = 4  # fewer missing blocks are not worth asking for
    match_s: float = 0.2
    stall_s: float = 0.25  # silence that ends a fetch
    share: float = 0.5  # of the time that recomputing would take
    most_s: float = 2.0  # for a fetch whose alternative is not known


@dataclass(slots=True)
class FetchRate:
    """Seconds that fetches of this worker take."""

    latency_s: float = 0.0  # to the first block
    bytes_per_s: float = 0.0  # after it
    _at_s: float | None = field(default=None)

    def record(self, first_s: float, rest_s: float, rest_bytes: int, now: float) -> None:
        """A fetch brought its first block after `first_s`, and `rest_bytes` more in `rest_s` after that."""
        fresh = not self.known(now)
        self._at_s = now
        self.latency_s = first_s if fresh else _mixed(self.latency_s, first_s)
        if rest_bytes:
            rate = rest_bytes / max(rest_s, 1e-6)
            self.bytes_per_s = rate if fresh or not self.bytes_per_s else _mixed(self.bytes_per_s, rate)

    def known(self, now: float) -> bool:
        return self._at_s is not None and now - self._at_s < FORGET_S

    def seconds(self, size_bytes: int, now: float) -> float | None:
        """What fetching `size_bytes` should take; None = not known."""
        if not self.known(now):
            return None
        return self.latency_s + (size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def _mixed(old: float, new: float) -> float:
    return old + SMOOTHING * (new - old)


@dataclass(frozen=True, slots=True)
class Missing:
    """What of a prompt the device does not have, and what it would take to compute it."""

    blocks: int
    block_bytes: int
    prefill_tokens_per_s: float  # 0 = not known

    @property
    def recompute_s(self) -> float | None:
        rate = self.prefill_tokens_per_s
        return self.blocks * BLOCK_TOKENS / rate if rate else None


def allowed_s(missing: Missing, limits: ColdLimits) -> float:
    """The longest that asking and fetching may take, together."""
    return limits.most_s if missing.recompute_s is None else limits.share * missing.recompute_s


def worth_fetching(missing: Missing, rate: FetchRate, limits: ColdLimits, now: float) -> bool:
    """Whether the blocks should be there in the time allowed, as far as anyone knows."""
    expected_s = rate.seconds(missing.blocks * missing.block_bytes, now)
    return missing.blocks >= limits.least_blocks and (expected_s is None or expected_s <= allowed_s(missing, limits))
