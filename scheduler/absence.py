"""When to stop waiting for a worker that is not there.

A request whose workers are all gone (or avoided, or draining) ends after `no_worker_grace_s`: long enough for a restart
to attach, short enough for a caller not to outlive its worker by much. Workers that are attached but unwell get longer.
Nothing ends before the replica has settled: after a start, workers need a moment to find it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mesh.errors import Unavailable
from scheduler.fairness import Shape
from scheduler.placement import Ask, PlacementPolicy, serving, usable
from scheduler.registry import Registry


@dataclass(frozen=True, slots=True)
class AbsencePolicy:
    """`retry_after_s` is what the caller is told."""

    settle_s: float = 3.0
    no_worker_grace_s: float = 2.0
    unwell_grace_s: float = 15.0
    retry_after_s: float = 5.0


class Absence:
    """Since when each shape that waits has had no worker, or no well one."""

    def __init__(self, policy: AbsencePolicy, started_s: float) -> None:
        self._policy = policy
        self._settled_s = started_s + policy.settle_s
        self._absent_since: dict[Shape, float] = {}
        self._unwell_since: dict[Shape, float] = {}

    def settled(self, now: float) -> bool:
        """Up long enough for running workers to have attached."""
        return now >= self._settled_s

    def hopeless(
        self, shapes: Iterable[Shape], workers: Registry, placement: PlacementPolicy, now: float
    ) -> dict[Shape, Unavailable]:
        """Of the shapes that wait now, those that are not worth waiting for, with what to tell their callers."""
        if not self.settled(now):
            return {}
        absent, unwell, verdicts = {}, {}, {}
        for shape in shapes:
            there = serving(Ask(shape.pins, 0, 0, 0, avoid=shape.avoid), workers)
            if not there.any():
                absent[shape] = self._absent_since.get(shape, now)
            if not usable(there, workers, placement, now).any():
                unwell[shape] = self._unwell_since.get(shape, now)
            if now - absent.get(shape, now) >= self._policy.no_worker_grace_s:
                verdicts[shape] = self._error(f"no worker serves {shape.pins.model} here now")
            elif now - unwell.get(shape, now) >= self._policy.unwell_grace_s:
                verdicts[shape] = self._error(f"no worker of {shape.pins.model} is well now")
        self._absent_since, self._unwell_since = absent, unwell
        return verdicts

    def _error(self, message: str) -> Unavailable:
        return Unavailable(message, code="no_worker", retry_after_s=self._policy.retry_after_s)
