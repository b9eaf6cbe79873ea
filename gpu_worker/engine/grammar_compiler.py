"""Grammars for the engine: compiled in a process of their own (grammar_press.py), remembered, and never waited for by
a step. `prepare` answers at once with a future; cancelling it, when nobody waits any more, ends the work.
"""

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.engine.grammar_press import Press
from gpu_worker.engine.grammar_workshop import Setup
from mesh.errors import Internal, InvalidRequest, Overloaded
from mesh.sampling import Sampling, Structure

if TYPE_CHECKING:
    from gpu_worker.engine.grammar import Grammar

LIMIT_S = 5.0  # of processor time, for compiling and trying one text
REMEMBERED = 128  # texts, the refused ones included
MOST_WAITING = 64

Key = tuple[Structure, str]


class GrammarCompiler:
    """For one vocabulary. Safe to call from one thread; `close` ends what it has started."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: list[int], limit_s: float = LIMIT_S) -> None:
        self._can_end = bool(end_ids)
        self._press = Press(Setup(str(tokenizer), vocab_size, end_ids, limit_s))
        self._known: OrderedDict[Key, Future[Grammar]] = OrderedDict()

    def warm(self) -> None:
        """Start the process in the background, so that the first structured answer need not wait for it."""
        if self._can_end:
            self._press.start()

    def prepare(self, sampling: Sampling) -> "Future[Grammar] | None":
        """The grammar of what is asked, now or later: the future may raise InvalidRequest that names the field. None
        where nothing is asked. Raises InvalidRequest, or Overloaded if too many are being compiled.
        """
        key = sampling.structure
        if key is None:
            return None
        if not self._can_end:
            raise InvalidRequest("this model has no token that could end a structured answer", field=key[0])
        future = self._known.get(key)
        if future is None or _spent(future):
            future = self._begin(key)
        self._known.move_to_end(key)
        return future

    def _begin(self, key: Key) -> "Future[Grammar]":
        if sum(not future.done() for future in self._known.values()) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} grammars are being compiled", retry_after_s=1)
        future: Future[Grammar] = Future()
        self._known[key] = future
        self._forget()
        self._press.order(*key, future)
        return future

    def _forget(self) -> None:
        """What has not been asked for longest, beyond what is to be remembered."""
        surplus = len(self._known) - REMEMBERED
        for key in [key for key, known in self._known.items() if known.done()][: max(0, surplus)]:
            del self._known[key]

    def close(self) -> None:
        """End the process; what still waits is cancelled."""
        for future in self._known.values():
            future.cancel()
        self._press.close()


def _spent(future: "Future[Grammar]") -> bool:
    """Whether it tells nothing of its text: it was called off, or the fault was ours."""
    return future.cancelled() or (future.done() and isinstance(future.exception(), Internal))
