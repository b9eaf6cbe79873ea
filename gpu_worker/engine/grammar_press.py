"""The compiler's process as the engine sees it: orders go out and grammars come back on a thread of its own.

The process takes seconds to come up. It is started by `start` or by the first order, and by the first order after it
has died; what was under way then fails, and nothing of ours is retried by itself.
"""

import contextlib
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpu_worker.engine import grammar_process
from gpu_worker.engine.grammar import Grammar
from gpu_worker.engine.grammar_process import Drop
from gpu_worker.engine.grammar_workshop import Compiled, Job, Setup
from gpu_worker.engine.vocabulary import tokenizer_info
from mesh.errors import Internal, InvalidRequest, ShoalError
from mesh.sampling import Structure

if TYPE_CHECKING:
    import xgrammar

# Its libraries start threads at their import otherwise, and a process with threads must not fork.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

log = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    structure: Structure
    future: Future[Grammar]


class Press:
    """For one vocabulary. Its methods never wait, but for `close`; they are for one thread."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._numbers = itertools.count()
        self._orders: queue.SimpleQueue[tuple[Job, Future[Grammar]] | Drop | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bell: Connection | None = None  # rung when there is an order
        # The thread's own from here on.
        self._wanted: dict[int, _Wanted] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._port: Connection | None = None
        self._info: xgrammar.TokenizerInfo | None = None

    def start(self) -> None:
        """The process, if it is not there."""
        if self._thread is None:
            ears, self._bell = Pipe(duplex=False)
            self._thread = threading.Thread(target=self._work, args=(ears,), name="grammar-press", daemon=True)
            self._thread.start()

    def order(self, structure: Structure, text: str, future: "Future[Grammar]") -> None:
        """`future` gets the grammar, InvalidRequest that names the field, or Internal. Cancelling it ends the work."""
        self.start()
        number = next(self._numbers)
        self._put((Job(number, structure, text), future))
        future.add_done_callback(lambda done: self._put(Drop(number)) if done.cancelled() else None)

    def close(self) -> None:
        """End the process; what still waits is left as it is."""
        if self._thread is not None:
            self._put(None)
            self._thread.join()
            self._thread = None

    def _put(self, order: tuple[Job, "Future[Grammar]"] | Drop | None) -> None:
        self._orders.put(order)
        if self._bell is not None:
            with contextlib.suppress(OSError):  # nobody hears: it was closed
                self._bell.send_bytes(b"")

    def _work(self, ears: Connection) -> None:
        self._awake()
        with ears:
            while self._obey():
                for source in wait([ears] if self._port is None else [ears, self._port]):
                    if source is ears:
                        ears.recv_bytes()
                    else:
                        self._hear()
        self._end()

    def _obey(self) -> bool:
        """Pass on every order that has come; False = the last was to end."""
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            if isinstance(order, Drop):
                if self._wanted.pop(order.number, None) is not None:
                    self._tell(order)
            else:
                job, future = order
                self._wanted[job.number] = _Wanted(job.structure, future)
                self._tell(job)
        return True

    def _tell(self, order: Job | Drop) -> None:
        try:
            self._awake().send_bytes(msgspec.msgpack.encode(order))
        except OSError:
            self._fail()

    def _hear(self) -> None:
        assert self._port is not None
        try:
            message = self._port.recv_bytes()
        except (EOFError, OSError):
            self._fail()
            return
        if message:
            self._settle(msgspec.msgpack.decode(message, type=Compiled))
        else:  # it is up; it has read the same file
            self._vocabulary()

    def _settle(self, compiled: Compiled) -> None:
        wanted = self._wanted.pop(compiled.number, None)
        if wanted is None or not wanted.future.set_running_or_notify_cancel():
            return
        try:
            wanted.future.set_result(self._grammar(wanted.structure, compiled))
        except ShoalError as error:
            wanted.future.set_exception(error)
        except Exception:  # a fault of ours: nobody must wait for ever because of it
            log.exception("a grammar could not be compiled")
            wanted.future.set_exception(Internal("something broke while a grammar was compiled; it is logged"))

    def _grammar(self, structure: Structure, compiled: Compiled) -> Grammar:
        import xgrammar

        if compiled.error:
            raise InvalidRequest(f"{structure} cannot be used: {compiled.error}", field=structure)
        native = xgrammar.CompiledGrammar.deserialize_json(compiled.serialized, self._vocabulary())
        return Grammar(native, self._setup.vocab_size)

    def _vocabulary(self) -> "xgrammar.TokenizerInfo":
        if self._info is None:
            self._info = tokenizer_info(Path(self._setup.tokenizer), self._setup.vocab_size, self._setup.end_ids)
        return self._info

    def _awake(self) -> Connection:
        """The port of a process that is up or comes up."""
        if self._port is not None:
            return self._port
        self._port, theirs = Pipe()
        command = [sys.executable, "-m", grammar_process.__name__, str(theirs.fileno())]
        with theirs:
            self._child = subprocess.Popen(
                command,
                env=os.environ | ONE_THREAD,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that its children can be ended with it
            )
        self._port.send_bytes(msgspec.msgpack.encode(self._setup))
        return self._port

    def _fail(self) -> None:
        """The process has died, or never came up: a fault of ours."""
        log.error("the process that compiles grammars has ended")
        self._end()
        for _, future in self._wanted.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(Internal("the process that compiles grammars has ended"))
        self._wanted.clear()

    def _end(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None
