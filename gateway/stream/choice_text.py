"""The text of one choice, from its token ids to what the client may see.

Ids are taken one by one, however they arrive, so the text and the count of tokens are the same whether the answer is
streamed or not, and whether the worker sent ids singly or in batches. After a stop nothing more is delivered.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from gateway.stream.markers import Watcher, compiled


class Detokenizer(Protocol):
    """What turns ids into text, carrying unfinished characters over (gateway/prompt/detokenizer.py)."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Piece(msgspec.Struct, frozen=True):
    """What a push brought.

    `stopped`: a stop string is complete; the choice ends with reason "stop" and the worker should be told.
    `keep_tokens`: how many of the choice's tokens count: all that were pushed so far or, once stopped, those up to and
    including the one that completed the stop.
    """

    text: str
    stopped: bool
    keep_tokens: int


class ChoiceText:
    """Watches one choice for stop strings. Delivers nothing of a stop, and the whole of what only began like one."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._watcher = Watcher(compiled(tuple(stops))) if stops else None
        self._stopped = False
        self._tokens = 0

    def push(self, ids: Sequence[int]) -> Piece:
        """The text that `ids` make safe to deliver: whole characters, no part of a stop."""
        if self._watcher is None:
            self._tokens += len(ids)
            return self._piece(self._detokenizer.push(ids))
        delivered = []
        for token in ids:
            if self._stopped:
                break
            self._tokens += 1
            delivered.append(self._watch(self._detokenizer.push((token,))))
        return self._piece("".join(delivered))

    def finish(self) -> Piece:
        """The choice has ended: what is still held, unless its last character completes a stop."""
        text = ""
        if not self._stopped:
            text = self._watch(self._detokenizer.finish())
        if self._watcher is not None and not self._stopped:
            text += self._watcher.finish()
        return self._piece(text)

    def _watch(self, text: str) -> str:
        if self._watcher is None:
            return text
        free, found = self._watcher.push(text)
        self._stopped = found is not None
        return free

    def _piece(self, text: str) -> Piece:
        return Piece(text, self._stopped, self._tokens)
