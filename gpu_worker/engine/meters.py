"""Rates of a running engine, measured from its own steps.

A step takes a fixed time, in which the weights are read, and a time for each token in it. So tokens per second of a
short prefill say little about a long one, and a mean over steps of all sizes says nothing. Two typical steps, one that
only decodes and one that also prefills, give the line

    seconds = fixed + tokens x per_token

and the prefill rate is what the line says of a step that is full of prefill: the rate at which a queue is worked off.
"""

import statistics
from collections import deque
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest step in what is typical
REMEMBERED_STEPS = 100


@dataclass(slots=True)
class Typical:
    """The typical step of a kind. The first is left out: it pays for what all later ones reuse."""

    tokens: float = 0.0
    seconds: float = 0.0
    _steps: int = -1

    @property
    def known(self) -> bool:
        return self._steps > 0

    def add(self, tokens: int, seconds: float) -> None:
        """A plain mean at first, then one that forgets."""
        self._steps += 1
        if self._steps:
            weight = max(SMOOTHING, 1 / self._steps)
            self.tokens += weight * (tokens - self.tokens)
            self.seconds += weight * (seconds - self.seconds)


class Meters:
    """Tokens per second, prefill and decode apart, and the median step. `full_step_tokens` is the most of a prefill."""

    def __init__(self, full_step_tokens: int) -> None:
        self.steps = 0
        self._full_step_tokens = full_step_tokens
        self._durations_ms: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._decoding = Typical()
        self._prefilling = Typical()  # with the decodes that went along

    def record(self, duration_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """One step that computed something."""
        self.steps += 1
        self._durations_ms.append(duration_s * 1000)
        kind = self._prefilling if prefill_tokens else self._decoding
        kind.add(prefill_tokens + decode_tokens, duration_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of steps that only decode; 0 = not yet known."""
        return self._decoding.tokens / max(self._decoding.seconds, 1e-9)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a step full of prefill; 0 = not yet known. Never below what was measured, whatever the line says."""
        short, long = self._decoding, self._prefilling
        if not long.known:
            return 0.0
        measured = long.tokens / max(long.seconds, 1e-9)
        if not short.known or long.tokens <= short.tokens or long.seconds <= short.seconds:
            return measured
        per_token_s = (long.seconds - short.seconds) / (long.tokens - short.tokens)
        fixed_s = max(0.0, short.seconds - per_token_s * short.tokens)
        full = max(self._full_step_tokens, long.tokens)
        return max(measured, full / (fixed_s + per_token_s * full))

    @property
    def median_step_ms(self) -> float:
        return statistics.median(self._durations_ms) if self._durations_ms else 0.0
