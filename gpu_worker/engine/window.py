"""How long an idle engine waits for companions of a first request. A policy; the clock comes in.

Whoever comes while a step runs joins the next one, so waiting gains a continuous batch little: part of one step's
fixed cost, and the first request pays for it. With bursts of 8 within 8 ms the timing model of a GPU says: the last
first token 10 % sooner for prompts of 256 tokens, the mean one 20 % later for prompts of 16; of a CPU: no change, and
30 % later. A static batch, which nobody can join, gains all: first tokens three to twenty times sooner. So the engine
waits only where companions are to be expected: after two idle starts in a row that each had some within the window,
and then until as many have come as came with the smaller of those, until `enough` are there, or until nobody came for
half of `least_s` (once `least_s` is over; `most_s` in any case). A client that is alone waits once after bursts have
ended, and never again. Static batches always wait for a full one.
"""

from collections import deque
from dataclasses import dataclass, field

REMEMBERED_STARTS = 2


@dataclass(slots=True)
class Window:
    """`enough` choices fill a batch; `always` = wait whatever came before."""

    least_s: float
    most_s: float
    enough: int
    always: bool = False
    _starts: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STARTS), init=False)
    _here: int = field(default=0, init=False)  # choices that came within the window, once it was opened
    _first_s: float = field(default=0.0, init=False)
    _last_s: float = field(default=0.0, init=False)
    _closed: bool = field(default=True, init=False)

    def idle(self) -> None:
        """The engine has nothing to do: the next request opens the window."""
        if self._here:
            self._starts.append(self._here)
        self._here, self._closed = 0, False

    def arrived(self, choices: int, now_s: float) -> None:
        """A request came."""
        if not self._here and self._closed:
            return
        if not self._here:
            self._first_s = now_s
        if now_s - self._first_s <= self.most_s:
            self._here += choices
            self._last_s = now_s

    def close(self) -> None:
        """There is something else to do: a step is under way, or a command wants its report."""
        self._closed = True

    def left_s(self, now_s: float) -> float:
        """Seconds to wait for companions; 0 = begin."""
        if self._closed or not self._here or self._here >= self._wanted():
            return 0.0
        quiet_s = max(self._first_s + self.least_s, self._last_s + self.least_s / 2)
        return max(0.0, min(quiet_s, self._first_s + self.most_s) - now_s)

    def _wanted(self) -> int:
        """How many are expected in all."""
        if self.always:
            return self.enough
        return min(*self._starts, self.enough) if len(self._starts) == REMEMBERED_STARTS else 0
