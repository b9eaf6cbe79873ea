"""A breaker for a dependency that one can do without: trouble shuts it, and asking in the background opens the way.

No request pays for finding out whether the dependency is back: while the breaker is open nothing is sent there but
probes by whoever owns it, ever more seldom. The dependency may answer probes and still fail at its work: its open time
goes on doubling until the very kind of work that failed has gone well again.
Source: Nygard, "Release It!" (2007), with exponential back-off.
A worker, which requests cannot do without, has another: scheduler/breaker.py lets a request through to find out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """`failures` in a row of one kind open it, for `open_s` at first and `open_most_s` at most."""

    failures: int = 3
    open_s: float = 0.5
    open_most_s: float = 15.0


class Breaker:
    """Of one dependency. Kinds of work are a few fixed words."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.closed = True
        self.probe_at_s = 0.0
        self._policy = policy
        self._open_s = policy.open_s
        self._failures: dict[str, int] = {}

    def succeeded(self, kind: str) -> None:
        """Work went well. Late news while it is open changes nothing: probes decide."""
        if not self.closed:
            return
        self._failures.pop(kind, None)
        if not self._failures:
            self._open_s = self._policy.open_s

    def failed(self, kind: str, now: float, *, at_once: bool = False) -> None:
        """Work failed; `at_once` = in a way that the next would, too (silence, nobody there)."""
        if not self.closed:
            return
        limit = self._policy.failures
        self._failures[kind] = limit if at_once else self._failures.get(kind, 0) + 1
        if self._failures[kind] >= limit:
            self._open(now)

    def probed(self, well: bool, now: float) -> None:
        """A probe's answer, or none in time."""
        if well:
            self.closed = True
        else:
            self._open(now)

    def _open(self, now: float) -> None:
        self.closed = False
        self.probe_at_s = now + self._open_s
        self._open_s = min(self._open_s * 2, self._policy.open_most_s)
