"""A breaker per worker: after failures in a row it lets nothing through, then one probe at a time.

Fed by what gateways say of the worker's health (it did not answer, broke, hung), never by a request's own fault.
Source: Nygard, "Release It!" (2007), with the open time doubling while probes fail. An answer may take minutes, and
what hangs shows in seconds: so a probe need not end, it has passed when it has run for `probe_s`.
"""

from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """The metric's values."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """`failures` in a row open it, for `open_s` at first and at most `open_most_s`. `probe_s` outlasts the silence that
    counts as hung.
    """

    failures: int = 3
    open_s: float = 2.0
    open_most_s: float = 30.0
    probe_s: float = 2.0


class Breaker:
    """Of one worker."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.state = State.CLOSED
        self._policy = policy
        self._in_a_row = 0
        self._open_s = policy.open_s
        self._until_s = 0.0
        self._probe: int | None = None
        self._probe_since_s = 0.0

    def allows(self, now: float) -> bool:
        """Whether a request may go there. An open breaker becomes half-open when its time is over, and closes when its
        probe has run for long enough; one more failure opens it again.
        """
        if self.state is State.OPEN and now >= self._until_s:
            self.state, self._probe = State.HALF_OPEN, None
        elif self._probe is not None and now - self._probe_since_s >= self._policy.probe_s:
            self.state, self._probe = State.CLOSED, None
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and self._probe is None)

    def granted(self, lease_id: int, now: float) -> None:
        """A request goes there; half-open, it is the probe."""
        if self.state is State.HALF_OPEN:
            self._probe, self._probe_since_s = lease_id, now

    def failed(self, lease_id: int, now: float) -> None:
        """The worker failed this request. Late news of older requests does not lengthen an open time."""
        self._in_a_row += 1
        if self.state is State.HALF_OPEN and self._probe == lease_id:
            self._open_s = min(self._open_s * 2, self._policy.open_most_s)
            self._open(now)
        elif self.state is State.CLOSED and self._in_a_row >= self._policy.failures:
            self._open_s = self._policy.open_s
            self._open(now)

    def _open(self, now: float) -> None:
        self.state, self._probe, self._until_s = State.OPEN, None, now + self._open_s

    def succeeded(self, lease_id: int) -> None:
        """The worker finished this request."""
        self._in_a_row = 0
        if self._probe == lease_id:
            self.state, self._probe = State.CLOSED, None

    def left(self, lease_id: int) -> None:
        """The request ended and said nothing of the worker: another may probe."""
        if self._probe == lease_id:
            self._probe = None
