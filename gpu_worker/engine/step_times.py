"""How long the steps took that carried a request, told when it ends: no step does anything for it."""

import statistics
from dataclasses import dataclass

# Steps whose durations are kept; of a longer answer the newest count.
REMEMBERED_STEPS = 4096


@dataclass(frozen=True, slots=True)
class Carried:
    """What carried a request. Durations in milliseconds, 0 where there was no step."""

    steps: int
    median_ms: float
    max_ms: float


class StepTimes:
    """A ring of the last steps' durations. `count` is the number of the next step: what a request remembers."""

    def __init__(self) -> None:
        self.count = 0
        self._ring_ms = [0.0] * REMEMBERED_STEPS

    def record(self, duration_ms: float) -> None:
        """A step that computed something ended."""
        self._ring_ms[self.count % REMEMBERED_STEPS] = duration_ms
        self.count += 1

    def since(self, first: int, under_way_ms: float | None) -> Carried:
        """Of the steps from number `first` on, with the one under way unless that is None."""
        numbers = range(max(first, self.count - REMEMBERED_STEPS), self.count)
        known = [self._ring_ms[number % REMEMBERED_STEPS] for number in numbers]
        known += [] if under_way_ms is None else [under_way_ms]
        if not known:
            return Carried(0, 0.0, 0.0)
        steps = self.count - first + (under_way_ms is not None)
        return Carried(steps, round(statistics.median(known), 2), round(max(known), 2))
