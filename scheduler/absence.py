"""When to stop waiting for a worker that is not there.

A request whose workers are all gone (or avoided, or draining) ends after `no_worker_grace_s`: long enough for a restart
to attach, short enough for a caller not to outlive its worker by much. Workers that are attached but unwell get longer.
An answer that its worker lost waits `restart_grace_s`, whichever it is, for all of it would have to be asked for again.
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
    restart_grace_s: float = 30.0
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

    def gone_for_good(self, shape: Shape, adrift_s: float, now: float) -> Unavailable | None:
        """What to tell the caller of an answer without a worker since `adrift_s`, if there was time for one to come.

        By what `hopeless` saw last. Who waited long for room is not given up for a moment in which no worker is well.
        """
        policy, unwell_since = self._policy, self._unwell_since.get(shape)
        if unwell_since is None or now - unwell_since < policy.no_worker_grace_s:
            return None
        if now - adrift_s < policy.restart_grace_s:
            return None
        return self._error(f"no worker of {shape.pins.model} came within {policy.restart_grace_s:g} s")

    def _error(self, message: str) -> Unavailable:
        return Unavailable(message, code="no_worker", retry_after_s=self._policy.retry_after_s)
