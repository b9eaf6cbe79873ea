"""Attempts that a worker runs and no lease here claims: this replica's vote to park them.

An attempt becomes a vote when it was reported for `after_s` without an open lease on that worker, counted from the
beginning of the worker's attach epoch. A lease that appears later takes the vote back; a new epoch voids all.
"""

from collections.abc import Set

Attempt = tuple[str, int]
Attempts = frozenset[Attempt]


class Strays:
    """Of one worker."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._epoch = -1
        self._since: dict[Attempt, float] = {}
        self._sent: Attempts = frozenset()

    def __len__(self) -> int:
        return len(self._sent)

    def seen(self, unclaimed: Set[Attempt], epoch: int, now: float) -> tuple[int, Attempts] | None:
        """Takes one report's unclaimed attempts; returns (epoch, whole set) when the votes changed, else None."""
        if epoch != self._epoch:
            self._epoch, self._since, self._sent = epoch, {}, frozenset()
        self._since = {attempt: self._since.get(attempt, now) for attempt in unclaimed}
        votes = frozenset(attempt for attempt, since in self._since.items() if now - since >= self._after_s)
        if votes == self._sent:
            return None
        self._sent = votes
        return epoch, votes
