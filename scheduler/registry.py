"""The attached workers: what they are, their load in columns, and the blocks they hold.

Columns (one structured numpy array, a row per slot) serve placement, which never loops over workers. A slot is given to
the next worker when its own has left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mesh.blocks import BLOCK_TOKENS
from scheduler.breaker import Breaker, BreakerPolicy
from scheduler.charges import Pending
from scheduler.demand import Pins
from scheduler.prefixes import PrefixIndex, Tier
from scheduler.reports import Hello, Load
from scheduler.strays import Strays

ROW = np.dtype(
    [
        ("attached", "?"),
        ("kind", "i4"),  # index of its Pins
        ("domain", "i4"),  # 0 = not told
        ("capacity_tokens", "i8"),  # longest sequence: context, or the whole pool
        ("total_blocks", "i8"),
        ("max_sequences", "i8"),
        ("reported", "?"),  # a Load has come
        ("reported_s", "f8"),
        ("healthy", "?"),
        ("draining", "?"),
        ("refuses", "?"),
        ("full", "?"),  # it refused; until its next report
        ("tripped", "?"),  # its breaker lets nothing through
        ("failed_s", "f8"),  # when a request last failed there; -inf = never
        ("queued_prefill_tokens", "f8"),
        ("sequences", "i8"),
        ("prefilling_sequences", "i8"),
        ("committed_blocks", "i8"),
        ("prefill_tokens_per_s", "f8"),  # 0 = not known
        ("median_step_ms", "f8"),
        ("tier_tokens_per_s", "f8", (len(Tier),)),  # 0 = not known
        ("pending_prefill_tokens", "f8"),
        ("pending_blocks", "i8"),
        ("pending_sequences", "i8"),
    ]
)
# Sets of pins whose workers are remembered.
MOST_CACHED = 1_024
Mask = NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Worker:
    """One attached worker. `connection` tells its stream from an earlier one of the same worker."""

    hello: Hello
    connection: int
    slot: int
    breaker: Breaker
    strays: Strays
    seq: int = 0
    # Between the order and the first piece, and between pieces.
    snapshot_ordered: bool = False
    snapshot_open: bool = False
    running: frozenset[tuple[str, int]] = field(default=frozenset())


class Registry:
    """Workers by id and by slot. Columns of slots without a worker are zero."""

    def __init__(self, breaker: BreakerPolicy, unclaimed_after_s: float, slots: int = 8) -> None:
        self.rows = np.zeros(slots, ROW)
        self.prefixes = PrefixIndex()
        self._breaker = breaker
        self._unclaimed_after_s = unclaimed_after_s
        self._workers: dict[str, Worker] = {}
        self._by_slot: dict[int, Worker] = {}
        self._kinds: dict[Pins, int] = {}
        self._domains: dict[str, int] = {"": 0}
        self._matching: dict[Pins, Mask] = {}
        self._of_line: dict[tuple[str, str], Mask] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> Worker | None:
        """The attached worker of this id."""
        return self._workers.get(worker_id)

    def at(self, slot: int) -> Worker:
        """The worker of an attached slot."""
        return self._by_slot[slot]

    def attach(self, hello: Hello, connection: int, now: float) -> Worker:
        """A new worker; one of the same id must have been detached before. It has no room until its first Load."""
        free = np.flatnonzero(~self.rows["attached"])
        if not len(free):
            free = np.array([len(self.rows)])
            self.rows = np.concatenate([self.rows, np.zeros(len(self.rows), ROW)])
        slot = int(free[0])
        worker = Worker(hello, connection, slot, Breaker(self._breaker), Strays(self._unclaimed_after_s))
        self._workers[hello.worker_id] = self._by_slot[slot] = worker
        row = self.rows[slot]
        row["attached"], row["reported_s"], row["failed_s"] = True, now, -np.inf
        row["kind"] = self._kinds.setdefault(hello.pins, len(self._kinds))
        row["domain"] = self._domains.setdefault(hello.fault_domain, len(self._domains))
        row["total_blocks"], row["max_sequences"] = hello.total_blocks, hello.max_sequences
        row["capacity_tokens"] = min(hello.context_tokens, hello.total_blocks * BLOCK_TOKENS)
        self._forget_masks()
        return worker

    def detach(self, worker: Worker) -> None:
        """The worker is gone, and what it held with it."""
        del self._workers[worker.hello.worker_id], self._by_slot[worker.slot]
        self.rows[worker.slot] = np.zeros((), ROW)
        self.prefixes.clear(worker.slot)
        self._forget_masks()

    def _forget_masks(self) -> None:
        self._matching.clear()
        self._of_line.clear()

    def report(self, worker: Worker, load: Load, now: float) -> bool:
        """Take a Load; returns whether block events were lost, so that a snapshot must be ordered.

        A repeated or older sequence number is dropped whole.
        """
        if load.seq <= worker.seq:
            return False
        gap = load.seq != worker.seq + 1
        worker.seq, worker.running = load.seq, load.running
        row = self.rows[worker.slot]
        row["reported"], row["reported_s"], row["full"] = True, now, False
        row["healthy"], row["draining"], row["refuses"] = load.healthy, load.draining, load.refuses
        row["queued_prefill_tokens"], row["sequences"] = load.queued_prefill_tokens, load.sequences
        row["prefilling_sequences"], row["committed_blocks"] = load.prefilling_sequences, load.committed_blocks
        row["prefill_tokens_per_s"], row["median_step_ms"] = load.prefill_tokens_per_s, load.median_step_ms
        row["tier_tokens_per_s"] = [load.tier_tokens_per_s.get(tier, 0.0) for tier in Tier]
        return self._blocks(worker, load, gap)

    def _blocks(self, worker: Worker, load: Load, gap: bool) -> bool:
        starts = load.snapshot and not (worker.snapshot_open and not gap)
        if starts:
            self.prefixes.clear(worker.slot)
            worker.snapshot_ordered = False
        worker.snapshot_open = load.snapshot_more
        if worker.hello.same_block_format:
            for change in load.blocks:
                self.prefixes.store(worker.slot, change.tier, change.stored)
                self.prefixes.evict(worker.slot, change.tier, change.evicted)
        if starts or not gap or worker.snapshot_ordered:
            return False
        worker.snapshot_ordered = True
        return True

    def set_pending(self, worker: Worker, pending: Pending) -> None:
        """What was granted to the worker and is in none of its reports."""
        row = self.rows[worker.slot]
        row["pending_prefill_tokens"], row["pending_blocks"] = pending.prefill_tokens, pending.blocks
        row["pending_sequences"] = pending.sequences

    def set_full(self, worker: Worker) -> None:
        """It refused: no room until its next report."""
        self.rows[worker.slot]["full"] = True

    def set_failed(self, worker: Worker, now: float) -> None:
        """A request failed there."""
        self.rows[worker.slot]["failed_s"] = now

    def refresh_breakers(self, now: float) -> None:
        """Show placement which breakers let nothing through."""
        for worker in self:
            self.rows[worker.slot]["tripped"] = not worker.breaker.allows(now)

    def matching(self, pins: Pins) -> Mask:
        """Attached workers that are what the pins say: [slot]. Cached until one comes or goes."""
        mask = self._matching.get(pins)
        if mask is None:
            mask = self._of_kinds([number for kind, number in self._kinds.items() if _serves(kind, pins)])
            if len(self._matching) >= MOST_CACHED:
                self._matching.clear()
            self._matching[pins] = mask
        return mask

    def of_line(self, line: tuple[str, str]) -> Mask:
        """Attached workers of a (model, pool), whatever their other pins: [slot]. Cached likewise."""
        mask = self._of_line.get(line)
        if mask is None:
            mask = self._of_kinds([number for kind, number in self._kinds.items() if kind.line == line])
            if len(self._of_line) >= MOST_CACHED:
                self._of_line.clear()
            self._of_line[line] = mask
        return mask

    def _of_kinds(self, kinds: list[int]) -> Mask:
        mask: Mask = self.rows["attached"] & np.isin(self.rows["kind"], kinds)
        return mask

    def slots_of(self, worker_ids: frozenset[str]) -> list[int]:
        """Slots of those that are attached."""
        return [worker.slot for worker_id in worker_ids if (worker := self.get(worker_id)) is not None]

    def domains_of(self, names: frozenset[str]) -> list[int]:
        """Column values of fault domains that are known."""
        return [self._domains[name] for name in names if name and name in self._domains]


def _serves(kind: Pins, wanted: Pins) -> bool:
    """Whether a worker of this kind may serve a request with these pins."""
    return (
        (kind.model, kind.pool, kind.adapter) == (wanted.model, wanted.pool, wanted.adapter)
        and wanted.tokenizer_digest in (b"", kind.tokenizer_digest)
        and wanted.model_digest in (b"", kind.model_digest)
        and wanted.precision in ("", kind.precision)
        and wanted.features <= kind.features
    )
