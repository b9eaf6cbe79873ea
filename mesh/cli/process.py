"""One process of the local mesh: started, watched, restarted with back-off, stopped in good order.

A child runs in a session of its own, so that Ctrl-C reaches only the supervisor, which knows the order of stopping. The
kernel ends it (SIGTERM) should the supervisor be killed: nothing is left behind either way.
"""

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from mesh.child import end_with_parent
from mesh.cli.log_tail import complaints, log_tail
from mesh.cli.plan import ProcessSpec
from mesh.cli.ports import PlanError
from mesh.cli.state import ProcessState
from mesh.client import Backoff
from mesh.settings import UNUSABLE_SETTINGS

PROBE_EVERY_S = 0.1
# A process that ends this often before it was ever ready will not come up by trying again.
MOST_FAILED_STARTS = 3
LOG_LINES = 15
# Nor will one that found other programs on its ports so often.
MOST_MOVES = 3
PORT_TAKEN = re.compile(r"cannot listen on|address already in use", re.IGNORECASE)
UNREAD_VARIABLE = re.compile(r"SHOAL_\w+ is set but nothing reads it(?:; did you mean \w+\?)?")

logger = logging.getLogger("shoal.supervisor")

Move = Callable[[ProcessSpec], ProcessSpec]
Probe = Callable[[ProcessSpec], Awaitable[bool]]


class StartFailed(Exception):
    """A process did not come up. The message ends with the last lines of its log."""


class ManagedProcess:
    """Runs one ProcessSpec until `stop`. `changed` is called whenever what `state` tells has changed.

    `move` gives other ports to a process that found its own taken at its first start; it raises PlanError.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        probe: Probe,
        changed: Callable[[], None],
        *,
        restart: bool,
        move: Move | None = None,
    ) -> None:
        self.spec = spec
        self.phase = "starting"
        self.why = ""  # how the process last ended, until it is ready again
        self.failure: StartFailed | None = None
        self._since = time.time()
        self._ended_pid: int | None = None
        self.restarts = 0
        self.ready = asyncio.Event()
        self._probe = probe
        self._changed = changed
        self._restart = restart
        self._move = move
        self._moves = 0
        self._stopping = asyncio.Event()
        self._killed = False
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0  # where the present start's log begins

    def state(self) -> ProcessState:
        process = self._process
        return ProcessState(
            role=self.spec.role,
            index=self.spec.index,
            pid=process.pid if process is not None and process.returncode is None else None,
            state=self.phase,
            since=self._since,
            why=self.why,
            restarts=self.restarts,
            ports=self.spec.ports,
            log=str(self.spec.log),
        )

    async def run(self) -> None:
        """Keep the process running until `stop`. Raises StartFailed if it cannot be brought up."""
        backoff = Backoff(first_s=0.2, most_s=10)
        failed_starts, ever_up = 0, False
        while not self._stopping.is_set():
            self._process = await self._start()
            logger.info("%s started (pid %d)", self.spec.name, self._process.pid)
            if self._killed:
                self.kill()
            elif self._stopping.is_set():
                self._process.terminate()
            self._set("starting" if not self.restarts else "restarting")
            came_up = await self._watch(self._process)
            self._tell_the_end(self._process)
            if self._stopping.is_set():
                break
            if not came_up and not ever_up and self._moved():
                continue
            failed_starts = 0 if came_up else failed_starts + 1
            ever_up = ever_up or came_up
            if not ever_up and self._process.returncode == UNUSABLE_SETTINGS:
                raise StartFailed(f"{self.spec.name} cannot use its settings:\n{complaints(self._last_words())}")
            if failed_starts >= (MOST_FAILED_STARTS if self._restart else 1):
                raise StartFailed(f"{self.spec.name} ended before it was ready:\n{self._last_words()}")
            if not self._restart:
                self._set("stopped")
                return
            if came_up:
                backoff.reset()
            self.ready.clear()
            self.restarts += 1
            self._set("restarting")
            wait_s = backoff.next_s()
            logger.info("%s is started again in %.1f s", self.spec.name, wait_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
        self._set("stopped")

    def _moved(self) -> bool:
        """Whether it ended because a port was taken, and has other ones now. Raises StartFailed when that is over."""
        words = self._last_words()
        if self._move is None or not PORT_TAKEN.search(words):
            return False
        failure = f"{self.spec.name} finds its ports taken by other programs:\n{words}"
        if self._moves == MOST_MOVES:
            raise StartFailed(failure)
        self._moves += 1
        try:
            self.spec = self._move(self.spec)
        except PlanError as error:
            raise StartFailed(f"{failure}\n{error}") from None
        logger.warning("%s is given other ports: %s", self.spec.name, self.spec.ports)
        self._changed()
        return True

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after `grace_s`. True if it ended by itself with exit code 0."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return True
        self._set("stopping")
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await process.wait() == 0
        except TimeoutError:
            logger.warning("%s is killed: not done within %.0f s", self.spec.name, grace_s)
            self.kill()
            await process.wait()
            return False
        finally:
            self._tell_the_end(process)

    def give_up(self, failure: StartFailed) -> None:
        """`run` raised this, and the mesh goes on without the process."""
        self.failure = failure
        self._set("failed")

    def kill(self) -> None:
        """SIGKILL, at once, to the process and to all that it started in its session."""
        self._stopping.set()
        self._killed = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _start(self) -> asyncio.subprocess.Process:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=os.environ | self.spec.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    async def _watch(self, process: asyncio.subprocess.Process) -> bool:
        """Wait until the process ends; True if it was ready before that."""
        ended = asyncio.ensure_future(process.wait())
        started = time.monotonic()
        try:
            while not ended.done() and not self.ready.is_set():
                if await self._probe(self.spec) and not self._stopping.is_set():
                    logger.info("%s is ready (pid %d)", self.spec.name, process.pid)
                    self.why = ""
                    self._set("ready")
                    self.ready.set()
                    break
                await asyncio.wait([ended], timeout=PROBE_EVERY_S if time.monotonic() - started < 10 else 0.5)
            await ended
        finally:
            ended.cancel()
        return self.ready.is_set()

    def _tell_the_end(self, process: asyncio.subprocess.Process) -> None:
        """Record it once, whether `run` or `stop` saw it first."""
        if self._ended_pid == process.pid:
            return
        self._ended_pid = process.pid
        how = ending(process.returncode)
        if self._stopping.is_set():
            logger.info("%s stopped: %s (pid %d)", self.spec.name, how, process.pid)
            return
        self.why = how
        logger.warning("%s %s (pid %d)", self.spec.name, how, process.pid)

    def unread_variables(self) -> set[str]:
        """What the present start's log says of SHOAL_ variables that it does not know, a sentence each."""
        with suppress(OSError):
            written = self.spec.log.read_bytes()[self._log_start :]
            return set(UNREAD_VARIABLE.findall(written.decode(errors="replace")))
        return set()

    def _last_words(self) -> str:
        return log_tail(self.spec.log, LOG_LINES, self._log_start)

    def _set(self, phase: str) -> None:
        if phase != self.phase:
            self.phase, self._since = phase, time.time()
        self._changed()


def ending(returncode: int | None) -> str:
    """How a process ended, from what waiting for it returned: minus the signal's number, or the exit code."""
    if returncode is None:
        return "runs"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"ended by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-returncode}"
