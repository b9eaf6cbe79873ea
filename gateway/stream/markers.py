"""Finds texts (stop strings, reasoning tags, tool marks) in a stream and holds back only what may become one.

The stream is read character by character, so what is found depends on the text alone and never on how it was cut into
tokens or messages. The first marker to be *complete* wins; of two that complete on the same character, the longer one,
so that no part of any marker is let through.

The machine is Aho and Corasick's (CACM 18, 1975): each state stands for the longest suffix of the text read so far that
begins some marker. That suffix is precisely what must be held, it is shorter than the longest marker, and following the
stream costs a few dictionary look-ups per character, whatever markers and text a caller thinks up.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _State:
    """`depth`: characters of the suffix it stands for. `marker`: index of the longest marker ending here, or None."""

    depth: int
    marker: int | None = None
    follow: dict[str, "_State"] = field(default_factory=dict)
    fallback: "_State | None" = None


class Markers:
    """The markers to look for, compiled; shared by any number of watchers. An empty text is no marker (ValueError)."""

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise ValueError("a marker must not be empty")
        self.texts = tuple(texts)
        self.root = _State(0)
        for index, text in enumerate(self.texts):
            self._spell(index, text)
        self._link()

    def _spell(self, index: int, text: str) -> None:
        state = self.root
        for character in text:
            state = state.follow.setdefault(character, _State(state.depth + 1))
        if state.marker is None:
            state.marker = index

    def _link(self) -> None:
        """Breadth first, so that a state's fallback, which is shallower, is linked before it."""
        queue = deque(self.root.follow.values())
        while queue:
            state = queue.popleft()
            for character, child in state.follow.items():
                child.fallback = self.step(state.fallback or self.root, character)
                queue.append(child)
            if state.marker is None and state.fallback is not None:
                state.marker = state.fallback.marker

    def step(self, state: _State, character: str) -> _State:
        """The state after one more character."""
        while (following := state.follow.get(character)) is None:
            if state is self.root:
                return state
            state = state.fallback or self.root
        return following


@lru_cache(maxsize=32)
def compiled(texts: tuple[str, ...]) -> Markers:
    """One compilation for all the choices of a request, and for the next request with the same stops."""
    return Markers(texts)


@dataclass(frozen=True, slots=True)
class Found:
    """A marker by its index. `rest` is text that came after it in the same push, not yet looked at."""

    marker: int
    rest: str


class Watcher:
    """Follows one text. `push` says what is surely free of markers and which marker was completed, if one was."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._state = markers.root
        self._held = ""

    def push(self, text: str) -> tuple[str, Found | None]:
        """Text to let through, which ends where the first completed marker begins. Push `Found.rest` to go on."""
        seen = self._held + text
        state = self._state
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = self._markers.step(state, character)
            if state.marker is not None:
                self._state, self._held = self._markers.root, ""
                start = end - len(self._markers.texts[state.marker])
                return seen[:start], Found(state.marker, seen[end:])
        free = len(seen) - state.depth
        self._state, self._held = state, seen[free:]
        return seen[:free], None

    def finish(self) -> str:
        """The text is over: what was held is no marker after all."""
        held, self._held, self._state = self._held, "", self._markers.root
        return held
