"""Who gives way when no block is left, and what becomes of what it has computed.

The victim is whoever's return costs least: the seconds until it stands again where it stood. What others hold too stays
anyway; the rest is either computed anew (tokens ÷ the measured prefill rate) or copied to host memory and back (bytes ÷
the measured copy rate), whichever is cheaper and possible. Of equals the youngest goes.

Nobody livelocks: the oldest running sequence is never a victim, can take blocks from all others and alone fits the
pool, so it advances in every step and ends. Waiting sequences start in order of arrival, so a victim runs again before
anybody younger starts, and comes to be the oldest.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from gpu_worker.engine.holdings import Holdings
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.swap import HostBuffer
from mesh.blocks import BLOCK_TOKENS

# Until they were measured: a small model on a CPU, and its memory.
UNKNOWN_TOKENS_PER_S, UNKNOWN_BYTES_PER_S = 1000.0, 2e9


@dataclass(frozen=True, slots=True)
class Price:
    """What setting a sequence back costs. `swap` = by copying, else by computing again."""

    seconds: float
    swap: bool


def price(tokens: int, blocks: int, tokens_per_s: float, host: HostBuffer) -> Price:
    """Of `tokens` tokens in `blocks` blocks that nobody else keeps."""
    recompute_s = tokens / (tokens_per_s or UNKNOWN_TOKENS_PER_S)
    if not 0 < blocks <= host.free:
        return Price(recompute_s, swap=False)
    swap_s = 2 * blocks * host.block_bytes / (host.bytes_per_s or UNKNOWN_BYTES_PER_S)
    return Price(swap_s, swap=True) if swap_s < recompute_s else Price(recompute_s, swap=False)


class Preemption:
    """Chooses victims and sets them back. Whoever calls moves them from the running to the waiting."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.recomputed = 0  # victims, by what becomes of their KV
        self.swapped = 0

    def victim(self, running: Many[Sequence]) -> Sequence:
        """Of those that run, by age, the one to lose its blocks. The oldest only if it is alone."""
        return min(running[1:] or running, key=self._rank)

    def set_back(self, victim: Sequence) -> None:
        """Take the victim's blocks, and keep their content if that is cheaper than computing it again."""
        if self._price(victim).swap and self._holdings.swap_out(victim):
            self.swapped += 1
        else:
            self._holdings.release(victim)
            self.recomputed += 1

    def _rank(self, sequence: Sequence) -> tuple[bool, float, int]:
        """Those that free no block come last: they share all they have."""
        return not self._holdings.private(sequence), self._price(sequence).seconds, -sequence.order

    def _price(self, sequence: Sequence) -> Price:
        kept = self._holdings.kept(sequence)
        tokens = sequence.computed - kept * BLOCK_TOKENS
        blocks = -(-tokens // BLOCK_TOKENS)
        return price(tokens, blocks, self._holdings.rates.prefill_tokens_per_s, self._holdings.host)
