"""Grammars for the engine: compiled in a process of their own, remembered, and never waited for by a step.

`prepare` answers at once with a future. One thread hands the texts to the compiler's process one after the other, and
starts that process when the first is wanted and again when one has brought it down; so a text costs at most its time
limit once, and whoever has no grammar notices nothing. Nothing here is imported or started before it is needed.
"""

import logging
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpu_worker.engine import grammar_process
from gpu_worker.engine.grammar import Grammar
from gpu_worker.engine.vocabulary import tokenizer_info
from mesh.errors import Internal, InvalidRequest, Overloaded, ShoalError
from mesh.sampling import Sampling, Structure

if TYPE_CHECKING:
    import xgrammar

LIMIT_S = 5.0  # of processor time, for compiling and trying one text
REMEMBERED = 128  # texts, the refused ones included
MOST_WAITING = 64

log = logging.getLogger(__name__)

Key = tuple[Structure, str]


class GrammarCompiler:
    """For one vocabulary. Safe to call from one thread; `close` ends what it has started."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: list[int], limit_s: float = LIMIT_S) -> None:
        self._setup = grammar_process.Setup(str(tokenizer), vocab_size, end_ids, limit_s)
        self._known: OrderedDict[Key, Future[Grammar]] = OrderedDict()
        self._wanted: queue.SimpleQueue[tuple[Key, Future[Grammar]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prepare(self, sampling: Sampling) -> "Future[Grammar] | None":
        """The grammar of what is asked, now or later: the future may raise InvalidRequest that names the field. None
        where nothing is asked. Raises InvalidRequest, or Overloaded if too many are being compiled.
        """
        key = sampling.structure
        if key is None:
            return None
        if not self._setup.end_ids:
            raise InvalidRequest("this model has no token that could end a structured answer", field=key[0])
        future = self._known.get(key)
        if future is None or _spent(future):
            future = self._begin(key)
        self._known.move_to_end(key)
        return future

    def _begin(self, key: Key) -> "Future[Grammar]":
        if sum(not future.done() for future in self._known.values()) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} grammars are being compiled", retry_after_s=1)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
            self._thread.start()
        future = self._known[key] = Future()
        self._forget()
        self._wanted.put((key, future))
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
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        press = _Press(self._setup)
        while (wanted := self._wanted.get()) is not None:
            key, future = wanted
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(press.grammar(key))
            except ShoalError as error:
                future.set_exception(error)
            except Exception:  # a fault of ours: nobody must wait for ever because of it
                log.exception("a grammar could not be compiled")
                future.set_exception(Internal("something broke while a grammar was compiled; it is logged"))
        press.close()


def _spent(future: "Future[Grammar]") -> bool:
    """Whether it tells nothing of its text: it was called off, or the fault was ours."""
    return future.cancelled() or (future.done() and isinstance(future.exception(), Internal))


class _Press:
    """The compiler's process, as its thread sees it."""

    def __init__(self, setup: grammar_process.Setup) -> None:
        self._setup = setup
        self._child: subprocess.Popen[bytes] | None = None
        self._port: Connection | None = None
        self._starting = False
        self._info: xgrammar.TokenizerInfo | None = None

    def grammar(self, key: Key) -> Grammar:
        """Raises InvalidRequest that names the field."""
        import xgrammar

        structure, text = key
        if self._info is None:
            self._info = tokenizer_info(Path(self._setup.tokenizer), self._setup.vocab_size, self._setup.end_ids)
        port = self._awake()
        try:
            port.send_bytes(msgspec.msgpack.encode(grammar_process.Job(structure, text)))
            compiled = msgspec.msgpack.decode(port.recv_bytes(), type=grammar_process.Compiled)
        except (EOFError, OSError):
            log.warning("compiling a %s of %d characters ended its process", structure, len(text))
            self._start()  # for the next one
            compiled = grammar_process.Compiled(error="it takes too much time or memory to compile")
        if compiled.error:
            raise InvalidRequest(f"{structure} cannot be used: {compiled.error}", field=structure)
        native = xgrammar.CompiledGrammar.deserialize_json(compiled.serialized, self._info)
        return Grammar(native, self._setup.vocab_size)

    def _awake(self) -> Connection:
        """The port of a process that is up. Raises Internal if none comes up."""
        port = self._port or self._start()
        if self._starting:
            try:
                port.recv_bytes()
            except (EOFError, OSError):
                self.close()
                raise Internal("the process that compiles grammars does not start") from None
            self._starting = False
        return port

    def _start(self) -> Connection:
        """A fresh process. It takes seconds to come up; it then says so."""
        self.close()
        ours, theirs = Pipe()
        command = [sys.executable, "-m", grammar_process.__name__, str(theirs.fileno())]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        ours.send_bytes(msgspec.msgpack.encode(self._setup))
        self._port, self._starting = ours, True
        return ours

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
