"""All lines, and one round of grants: take from a line in its order, as long as a worker has room for somebody.

A request that fits nowhere is passed over, not waited for. If it is overdue, the worker where it is likeliest to fit
next is held for it for the rest of the round, so the smaller ones behind it cannot eat the room that comes free there
(backfilling with one reservation; source: Lifka, "The ANL/IBM SP Scheduling System", 1995).
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.demand import class_name
from scheduler.fairness import Shape, Waiting
from scheduler.placement import Ask, Placement, PlacementPolicy, place, roomiest, spare_blocks
from scheduler.queue import Line, QueuePolicy
from scheduler.registry import Mask, Registry

# Failed placements after which a round ends; only different shapes and ever smaller requests count as different.
MOST_MISSES = 64
log = logging.getLogger("shoal.scheduler")


@dataclass(slots=True)
class Misses:
    """What did not fit in this round. Room only shrinks within one, so whatever needs as much need not be tried.

    `spare` = most blocks that anything could be given when the round began.
    """

    spare: float
    count: int = 0
    _needs: dict[Shape, list[tuple[float, int, int]]] = field(default_factory=dict)

    def add(self, waiting: Waiting) -> None:
        self.count += 1
        # Too many blocks for anybody: so are all that need more than there are, however short.
        too_many = waiting.blocks > self.spare
        need = (self.spare + 1, 0, 0) if too_many else (waiting.blocks, waiting.span_tokens, waiting.choices)
        self._needs.setdefault(waiting.shape, []).append(need)

    def cover(self, waiting: Waiting) -> bool:
        """Whether something of the same shape that needs no more than this was tried in vain."""
        for blocks, span, choices in self._needs.get(waiting.shape, ()):
            if waiting.blocks >= blocks and waiting.span_tokens >= span and waiting.choices >= choices:
                return True
        return False


@dataclass(frozen=True, slots=True)
class QueueStat:
    """One class of one line. `cost` in token-equivalents."""

    model: str
    pool: str
    queue_class: str
    waiting: int
    oldest_s: float
    cost: float


class Lines:
    """The queue of each (model, pool) that anybody waits for."""

    def __init__(self, queue: QueuePolicy, placement: PlacementPolicy) -> None:
        self.policy = queue
        self._placement = placement
        self._lines: dict[tuple[str, str], Line] = {}

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            yield from line

    def active(self) -> list[tuple[str, str]]:
        """(model, pool) of the lines that exist now."""
        return list(self._lines)

    def line(self, key: tuple[str, str]) -> Line:
        """The line, made if need be."""
        if key not in self._lines:
            self._lines[key] = Line(self.policy)
        return self._lines[key]

    def sweep(self) -> None:
        """Forget lines in which nobody waits."""
        self._lines = {key: line for key, line in self._lines.items() if len(line)}

    def round(
        self, key: tuple[str, str], workers: Registry, ask_of: Callable[[Waiting], Ask], now: float
    ) -> Iterator[tuple[Waiting, Placement]]:
        """Grants of one line. The caller books each on its worker before asking for the next."""
        line = self._lines.get(key)
        spare = spare_blocks(key, workers, self._placement, now) if line else 0
        if not line or not spare:
            return
        misses = Misses(spare)
        held = np.zeros(len(workers.rows), np.bool_)
        while misses.count < MOST_MISSES and (waiting := line.pick(now, misses.cover)) is not None:
            ask = ask_of(waiting)
            placement = self._placed(ask, workers, now, held)
            if placement is not None:
                line.take(waiting, now)
                yield waiting, placement
                continue
            misses.add(waiting)
            if waiting.overdue_s <= now:
                slot = roomiest(ask, workers, self._placement, now)
                if slot is not None:
                    held[slot] = True

    def _placed(self, ask: Ask, workers: Registry, now: float, held: Mask) -> Placement | None:
        """Where to run it. One whose numbers cannot be reckoned with fits nowhere, and the others have their turn."""
        try:
            return place(ask, workers, self._placement, now, held)
        except (ArithmeticError, ValueError):
            log.exception("a request could not be placed")
            return None

    def stats(self, now: float) -> list[QueueStat]:
        """What waits, by class; for the gateways and the metrics."""
        groups: dict[tuple[str, str, str], list[Waiting]] = {}
        for (model, pool), line in self._lines.items():
            for waiting in line:
                groups.setdefault((model, pool, class_name(waiting.priority, waiting.size)), []).append(waiting)
        return [
            QueueStat(*key, len(group), now - min(w.arrived_s for w in group), sum(w.cost for w in group))
            for key, group in groups.items()
        ]
