"""The one place where asyncio meets the engine process: starts it, talks to it, and routes what it says.

Reports are read and commands written on the event loop itself (link.py), without waiting, so a stopped engine holds
nothing up; blocks of KV go by a socket of their own (cold/exchange.py). The process's end is the one failure there is:
every open stream then ends with Unavailable without a cause, which sends its request to another worker, and `lost` is
set.
"""

import asyncio
import logging
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

from gpu_worker.engine import messages, process
from gpu_worker.engine.api import EngineInfo, EngineLoad, Plan, StepResult
from gpu_worker.engine.config import EngineConfig
from gpu_worker.link import EngineLink, linked
from gpu_worker.pulse import Pulse
from gpu_worker.streams import EventStream
from mesh.errors import AlreadyExists, Superseded, Unavailable

# Commands on their way to an engine that is in a step. New requests are refused at half of it.
COMMANDS = 4096
# Commands that travel as one.
TOGETHER = 64
# After Shutdown: seconds until the process is killed.
SHUTDOWN_S = 2.0

log = logging.getLogger("shoal.bridge")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears what the engine says besides the streams. Called on the event loop; must not wait."""

    loading: Callable[[float, str], None]  # fraction done, what is being done
    stepped: Callable[[StepResult], None]
    cached: Callable[[list[bytes]], None]  # chain keys of all cached blocks, once after loading


class Bridge:
    """The engine, as the event loop sees it. Made by `engine_process`."""

    def __init__(
        self, blocks: socket.socket, child: SpawnProcess, pulse: Pulse, listeners: Listeners, stream_interval_s: float
    ) -> None:
        self._stream_interval_s = stream_interval_s
        self.blocks = blocks  # for cold.exchange.Exchange
        self.info: EngineInfo | None = None
        self.load: EngineLoad | None = None
        self.lost = asyncio.Event()
        self.unusable: messages.Unusable | None = None  # lost for this, and a fresh process would be, too
        self.pulse = pulse
        self._child = child
        self._listeners = listeners
        self._ready = asyncio.Event()  # set by the first step after Ready, or by the loss
        self._why = ""
        self._streams: dict[str, EventStream] = {}
        self._commands: asyncio.Queue[messages.Command] = asyncio.Queue(COMMANDS)

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._child.pid

    async def ready(self) -> EngineInfo | None:
        """Wait until the engine has made a real token; None if it never will."""
        await self._ready.wait()
        return self.info

    @property
    def why_lost(self) -> str:
        """Why `lost` is set, for the log."""
        return self._why

    def well(self) -> bool:
        """Loaded, there, and no step overdue."""
        return self._ready.is_set() and not self.lost.is_set() and self.pulse.well(time.monotonic())

    def running(self) -> frozenset[tuple[str, int]]:
        """(request_id, attempt) of all that runs or waits here, on either side of the border."""
        engine = self.load.running if self.load is not None else []
        return frozenset(engine) | {(stream.request_id, stream.attempt) for stream in self._streams.values()}

    @asynccontextmanager
    async def generation(self, plan: Plan) -> AsyncIterator[EventStream]:
        """Take `plan`, to run from `submit` on; leaving the block frees what is left of it, however it was left.

        Raises Unavailable (not ready, overdue or lost) or AlreadyExists. A newer attempt ends the older one's stream
        with Superseded. What the engine refuses is raised by the stream.
        """
        stream = self._begin(plan)
        try:
            yield stream
        finally:
            if self._streams.get(plan.request_id) is stream:
                del self._streams[plan.request_id]
                self._free(stream)

    def _begin(self, plan: Plan) -> EventStream:
        if not self.well() or self._commands.qsize() > COMMANDS // 2:
            raise Unavailable("the engine is not ready or a step is overdue", code="not_ready", retry_after_s=1)
        older = self._streams.get(plan.request_id)
        if older is not None and older.attempt >= plan.attempt:
            raise AlreadyExists(f"attempt {older.attempt} of this request runs here")
        if older is not None:
            self._free(older)
            older.fail(Superseded(f"attempt {plan.attempt} took over"))
        stream = self._streams[plan.request_id] = EventStream(plan, self._stream_interval_s)
        return stream

    def submit(self, stream: EventStream, plan: Plan) -> None:
        """Let the engine run a stream's plan, which may have learnt something since. Only the first time counts."""
        if not stream.submitted and self._streams.get(stream.request_id) is stream:
            stream.submitted = True
            self._send(messages.Submit(plan))

    def _free(self, stream: EventStream) -> None:
        if stream.submitted and stream.open_choices:
            self._send(messages.Abort(stream.request_id, stream.attempt))

    def stop_choice(self, request_id: str, attempt: int, choice: int, keep_tokens: int) -> None:
        """End one choice with STOP, its output counted as `keep_tokens`. What is not running is ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt == attempt and choice in stream.open_choices:
            self._send(messages.StopChoice(request_id, attempt, choice, keep_tokens))

    def park(self, request_id: str, attempt: int, reason: str) -> None:
        """End the attempt's choices with PARKED. What is not running is ignored."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.attempt == attempt and stream.open_choices:
            log.info("parking %s, attempt %d: %s", request_id, attempt, reason)
            self.submit(stream, stream.plan)  # what waits for KV only is parked by the engine, too
            self._send(messages.Park(request_id, attempt))

    def park_all(self, reason: str) -> None:
        """Park everything that runs or waits here."""
        for stream in list(self._streams.values()):
            self.park(stream.request_id, stream.attempt, reason)

    def give_up(self, why: str) -> None:
        """Kill the engine process; `lost` follows."""
        self._why = self._why or why
        self._child.kill()

    def _send(self, command: messages.Command) -> None:
        if self.lost.is_set():
            return
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            self.give_up(f"{COMMANDS} commands wait: it takes none")
            return
        self.pulse.owe(time.monotonic())

    async def shut_down(self, reader: asyncio.Task[None]) -> None:
        """Let the process end, within SHUTDOWN_S by itself. What still runs is lost."""
        if self.info is not None:  # while it loads it hears nothing
            self._send(messages.Shutdown())
            await asyncio.wait([reader], timeout=SHUTDOWN_S)
        if not reader.done():
            self._child.kill()
            await asyncio.wait([reader])

    async def read(self, link: EngineLink) -> None:
        """Until the process ends."""
        await link.ended()
        await asyncio.to_thread(self._child.join, SHUTDOWN_S)
        self._lose()

    async def write(self, link: EngineLink) -> None:
        """Until cancelled. What was commanded in one breath reaches the engine before the same step."""
        while True:
            together = [await self._commands.get()]
            while len(together) < TOGETHER and not self._commands.empty():
                together.append(self._commands.get_nowait())
            await link.send(*map(messages.encode, together))

    def hear(self, frame: bytes) -> None:
        """What the engine says, as it comes."""
        self._hear(messages.decode_report(frame))

    def _hear(self, report: messages.Report) -> None:
        match report:
            case messages.StepDone(result):
                self._stepped(result)
            case messages.Rejected():
                stream = self._streams.get(report.request_id)
                if stream is not None and stream.attempt == report.attempt:
                    stream.fail(report.error())
            case messages.Loading(fraction, what):
                self._listeners.loading(fraction, what)
            case messages.Ready(info):
                self.info = info
                self._send(messages.BlockKeys())  # a step follows every command: with it the load is known, too
            case messages.Snapshot(keys):
                self._listeners.cached(keys)
            case messages.Fatal(message, unusable):
                self._why, self.unusable = message, unusable
        if isinstance(report, messages.StepDone | messages.Rejected | messages.Snapshot):
            self._answered()

    def _stepped(self, result: StepResult) -> None:
        self.load = result.load
        self._ready.set()
        for event in result.events:
            stream = self._streams.get(event.request_id)
            if stream is not None and stream.attempt == event.attempt:
                stream.put(event)
        self._listeners.stepped(result)

    def _answered(self) -> None:
        busy = bool(self.load is not None and self.load.running) or any(
            stream.submitted and stream.open_choices for stream in self._streams.values()
        )
        median_s = self.load.median_step_ms / 1000 if self.load is not None else 0.0
        self.pulse.answer(time.monotonic(), more=busy, median_step_s=median_s)

    def _lose(self) -> None:
        self._why = self._why or f"the engine process ended with exit code {self._child.exitcode}"
        self.lost.set()
        self._ready.set()
        for stream in self._streams.values():
            stream.fail(Unavailable("the engine process ended"))


@asynccontextmanager
async def engine_process(
    config: EngineConfig, pulse: Pulse, listeners: Listeners, stream_interval_s: float = 0.0
) -> AsyncIterator[Bridge]:
    """Start the engine's process and end it with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair()
    our_blocks, their_blocks = socket.socketpair()
    child = context.Process(target=process.run, args=(theirs, config, their_blocks), name="shoal-engine", daemon=True)
    child.start()
    theirs.close()  # so that the end of the process is the end of the connection
    their_blocks.close()
    bridge = Bridge(our_blocks, child, pulse, listeners, stream_interval_s)
    async with linked(ours, bridge.hear) as link, asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(bridge.read(link))
        writer = tasks.create_task(bridge.write(link))
        try:
            yield bridge
        finally:
            await bridge.shut_down(reader)
            writer.cancel()
    our_blocks.close()
