"""How many choices may run at once: a limit that follows the load. Pure; the clock comes in.

Load is what a step without prompts takes, for the choices that run, over what a stream may wait for a token. Below
30 % of it the limit grows by half, above 80 % it shrinks to 0.7 of itself, within its range; in between it stays, which
is the hysteresis, and so does it while a load has not lasted for HOLD_S. It begins at the top of its range: that a step
is too long must be seen first. What runs already is never thrown out; a shrunken limit is reached as answers end.

How full the KV pool is does not count here: a sequence that finds no room waits (schedule.py), whatever the limit.
"""

from dataclasses import dataclass, field

GROW_BELOW, GROWTH = 0.3, 1.5
SHRINK_ABOVE, SHRINKING = 0.8, 0.7
HOLD_S = 1.0


@dataclass(slots=True)
class BatchLimit:
    """`target_s` is the longest that a step should take."""

    fewest: int
    most: int
    target_s: float
    limit: int = field(init=False)
    _side: int = field(default=0, init=False)  # -1 = little load, 1 = too much
    _since_s: float = field(default=0.0, init=False)
    _last_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.limit = self.most

    def record(self, step_s: float, now_s: float) -> int:
        """A step without prompts takes `step_s` now. Returns the limit."""
        load = step_s / self.target_s
        side = (load > SHRINK_ABOVE) - (load < GROW_BELOW)
        idle, self._last_s = now_s - self._last_s > HOLD_S, now_s
        if side != self._side or idle:
            self._side, self._since_s = side, now_s
        elif side and now_s - self._since_s >= HOLD_S:
            self._since_s = now_s
            wanted = self.limit * (SHRINKING if side > 0 else GROWTH)
            self.limit = min(max(round(wanted), self.fewest), self.most)
        return self.limit
