"""Rates of a running engine, measured from its own steps."""

import statistics
from collections import deque

SMOOTHING = 0.1  # weight of the newest step in a rate
REMEMBERED_STEPS = 100


class Meters:
    """Tokens per second, prefill and decode apart, and the median step."""

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_tokens_per_s = 0.0
        self.decode_tokens_per_s = 0.0
        self._durations_ms: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._decode_step_s = 0.0  # of steps that only decode

    def record(self, duration_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """One step. In a mixed one, what a step of decodes alone takes is not prefill's."""
        self.steps += 1
        self._durations_ms.append(duration_s * 1000)
        if decode_tokens and not prefill_tokens:
            self._decode_step_s = _smoothed(self._decode_step_s, duration_s)
            self.decode_tokens_per_s = _smoothed(self.decode_tokens_per_s, decode_tokens / max(duration_s, 1e-9))
        elif prefill_tokens:
            own_s = max(duration_s - (self._decode_step_s if decode_tokens else 0.0), duration_s / 10, 1e-9)
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, prefill_tokens / own_s)

    @property
    def median_step_ms(self) -> float:
        return statistics.median(self._durations_ms) if self._durations_ms else 0.0


def _smoothed(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
