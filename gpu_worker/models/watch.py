"""Times the parts of one forward pass. A step that is not timed has no watch, and asks no clock."""

import time
from collections.abc import Callable
from enum import IntEnum


class Part(IntEnum):
    """What gpu_worker.engine.api.Parts tells apart."""

    ATTENTION = 0
    FEED_FORWARD = 1
    SAMPLING = 2
    OTHER = 3


class Watch:
    """Books time to parts, from lap to lap. `settle` waits until the device has done what it was given."""

    def __init__(self, settle: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = [0.0] * len(Part)
        self._settle = settle
        self._clock = clock
        self._last_s = clock()

    def lap(self, part: Part) -> None:
        """What was done since the lap before was `part`."""
        self._settle()
        now_s = self._clock()
        self.seconds[part] += now_s - self._last_s
        self._last_s = now_s
