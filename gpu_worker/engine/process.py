"""The engine process's main loop: commands in, steps, reports out. Nothing else of the worker lives in this process.

Between steps it takes every command that has arrived, and of the blocks that come and go (bulk.py) what a short time
allows; without work it waits for either. Writing a report may block while the worker is slow to read: then the engine
waits too, and nothing piles up. The worker must therefore never stop reading in order to write.
"""

import logging
import signal
import socket
import time
from multiprocessing.connection import wait

from gpu_worker.engine.api import Engine
from gpu_worker.engine.build import build_engine, warm_up
from gpu_worker.engine.bulk import FLOOR_S, IDLE_S, LINGER_S, STEP_SHARE, BulkPort, carry
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.frames import FramePort
from gpu_worker.engine.messages import (
    Abort,
    BlockKeys,
    Command,
    Fatal,
    Loading,
    Park,
    Ready,
    Rejected,
    Report,
    Shutdown,
    Snapshot,
    StepDone,
    StopChoice,
    Submit,
    decode_command,
    encode,
)
from gpu_worker.engine.presets import window_of
from gpu_worker.engine.vitality import EngineBroken
from gpu_worker.engine.window import Window
from gpu_worker.models.errors import LoadError, PoolTooSmall
from mesh.errors import ShoalError

log = logging.getLogger(__name__)

LOADING_STEP = 0.02  # report loading no more finely than this
STARTED = 0.1  # of loading, before the model is opened
PREPARING_S = 0.02  # without work, look so often whether a grammar has come
LEISURE_S = 5.0  # without work for so long, an engine gets ready for what may come


def run(end: socket.socket, config: EngineConfig, bulk: socket.socket | None = None) -> None:
    """Load, prove, serve until Shutdown or the worker's end. The target of a spawned process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the worker decides when we stop
        signal.signal(number, signal.SIG_IGN)
    try:
        _run(_Port(end, bulk), config)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.info("the worker is gone")
    finally:
        end.close()
        if bulk is not None:
            bulk.close()


def _run(port: "_Port", config: EngineConfig) -> None:
    def building(fraction: float, what: str) -> None:
        port.report_loading(STARTED + (1 - STARTED) * fraction, what)

    port.report_loading(0.0, "starting the engine")  # importing torch takes seconds
    try:
        engine = build_engine(config, building)
        port.report_loading(0.98, "producing the first token")
        warm_up(engine, config.model)
        port.report_loading(1.0, "done")
    except (LoadError, ShoalError) as error:  # says all that can be done about it: no traceback, the worker logs it
        port.send(Fatal(str(error), unusable="setting" if isinstance(error, PoolTooSmall) else "model"))
        return
    except (RuntimeError, MemoryError) as error:
        log.exception("the engine cannot start")
        port.send(Fatal(str(error) or type(error).__name__))
        return
    port.send(Ready(engine.info))
    try:
        serve(engine, port, window_of(config, engine.info))
    except (EOFError, OSError):
        raise
    except EngineBroken as error:
        log.exception("the engine is broken")
        port.send(Fatal(str(error)))
    except Exception as error:
        log.exception("the engine loop broke")
        port.send(Fatal(f"the engine loop broke ({type(error).__name__})"))


def serve(engine: Engine, port: "_Port", window: Window | None = None) -> None:
    """Obey between steps, step while there is work, return on Shutdown.

    A step follows every command, work or not: the report tells the worker what an abort has freed. Only the first
    requests after idleness may wait for more of them (window.py; None = they never do), with the blocks' port served
    meanwhile.
    """
    window = window or Window(0.0, 0.0, 1)
    bulk_s, linger_s = FLOOR_S, 0.0
    leisure_s: float | None = LEISURE_S
    while True:
        if not engine.has_work():
            window.idle()
            if not port.wait(PREPARING_S if engine.preparing else leisure_s) and not engine.preparing:
                engine.use_leisure()
                leisure_s = None
            bulk_s, linger_s = IDLE_S, LINGER_S
        if not take(engine, port, window):
            return
        if linger_s and engine.has_work():  # a request ended the idleness: it is not to wait for blocks
            bulk_s, linger_s = FLOOR_S, 0.0
        if port.bulk is not None:
            carry(engine.transfer, port.bulk, bulk_s, linger_s)
        if (left_s := window.left_s(time.monotonic())) and engine.has_work():
            port.wait(left_s)
            continue
        window.close()
        result = engine.step()
        for plan, error in engine.take_refused():
            port.send(Rejected.of(plan, error))
        bulk_s, linger_s = max(FLOOR_S, STEP_SHARE * result.duration_ms / 1000), 0.0
        port.send(StepDone(result))


def take(engine: Engine, port: "_Port", window: Window) -> bool:
    """Carry out every command that has arrived; False = the last was Shutdown."""
    while port.pending():
        command = port.receive()
        if isinstance(command, Shutdown):
            return False
        if isinstance(command, Submit):
            window.arrived(len(command.plan.choices), time.monotonic())
        else:
            window.close()
        obey(engine, command, port)
    return True


def obey(engine: Engine, command: Command, port: "_Port") -> None:
    """Carry out one command; a request that is refused is answered at once."""
    match command:
        case Submit(plan):
            try:
                engine.submit(plan)
            except ShoalError as error:
                port.send(Rejected.of(plan, error))
        case Abort(request_id, attempt):
            engine.abort(request_id, attempt)
        case Park(request_id, attempt):
            engine.park(request_id, attempt)
        case StopChoice(request_id, attempt, choice, keep_tokens):
            engine.stop_choice(request_id, attempt, choice, keep_tokens)
        case BlockKeys():
            port.send(Snapshot(engine.block_keys()))


class _Port:
    """Messages over a connection, with the blocks' port beside it; EOFError when the worker has gone."""

    def __init__(self, end: socket.socket, bulk: socket.socket | None = None) -> None:
        self.bulk = BulkPort(bulk) if bulk is not None else None
        self._frames = FramePort(end)
        self._reported = -1.0

    def wait(self, within_s: float | None) -> bool:
        """Until there is something to do (a command, or a block), or the time is up: then False."""
        if self._frames.holds:
            return True
        ends = [self._frames.fileno()] if self.bulk is None else [self._frames.fileno(), self.bulk.fileno()]
        return bool(wait(ends, within_s))

    def pending(self) -> bool:
        return self._frames.pending()

    def receive(self) -> Command:
        return decode_command(self._frames.receive())

    def send(self, report: Report) -> None:
        self._frames.send(encode(report))

    def report_loading(self, fraction: float, what: str) -> None:
        if fraction - self._reported >= LOADING_STEP:
            self._reported = fraction
            self.send(Loading(fraction, what))
