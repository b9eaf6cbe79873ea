"""Whether the engine is alive: a policy over what it owes and when it last answered. Pure; the clock comes in.

A process that runs and a port that is open prove nothing (fault B22): the engine is well when nothing is owed, or when
what is owed came in time. Once overdue, only an answer makes it well again: that the clients have gone does not.
"""

from dataclasses import dataclass

# A receiver of Progress takes the worker for hung by the same rule (worker.proto).
MEDIAN_STEPS = 20


@dataclass(slots=True)
class Pulse:
    """`overdue_s` is the least silence that counts, seconds. All times are of one monotonic clock."""

    overdue_s: float
    median_step_s: float = 0.0
    owed_since: float | None = None

    def owe(self, now: float) -> None:
        """The engine was given work, or a command that it answers."""
        if self.owed_since is None:
            self.owed_since = now

    def answer(self, now: float, *, more: bool, median_step_s: float) -> None:
        """The engine completed a step; `more` = it has work left."""
        self.owed_since = now if more else None
        self.median_step_s = median_step_s

    def patience_s(self) -> float:
        """Silence that is still no reason to worry, seconds: max(1.5 s, 20 median steps) by default."""
        return max(self.overdue_s, MEDIAN_STEPS * self.median_step_s)

    def overdue_for(self, now: float) -> float:
        """Seconds since a step became overdue; 0 while the engine is well."""
        if self.owed_since is None:
            return 0.0
        return max(0.0, now - self.owed_since - self.patience_s())

    def well(self, now: float) -> bool:
        """No step is overdue."""
        return self.overdue_for(now) == 0.0
