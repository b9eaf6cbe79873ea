"""The worker's end of the connection with its engine process: frames in and out on the event loop, no thread between.

A step's report that goes through a thread wakes two cores twice; so it is read where it is used.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from gpu_worker.engine.frames import Frames, framed


class EngineLink(asyncio.Protocol):
    """`hear` gets each message as it comes; what it raises ends the link and is raised by `ended`."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self._hear = hear
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ended(self) -> None:
        """Wait until the other end is gone."""
        await asyncio.shield(self._ended)

    async def send(self, *messages: bytes) -> None:
        """Hand messages over as one; waits while the engine takes none. Without effect once it is gone."""
        await self._writable.wait()
        if self._transport is not None:
            self._transport.write(b"".join(map(framed, messages)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._hear(message)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        if self._ended.done():
            return
        if error is None or isinstance(error, OSError):
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def linked(end: socket.socket, hear: Callable[[bytes], None]) -> AsyncIterator[EngineLink]:
    """A link over `end`, which it owns and closes."""
    link = EngineLink(hear)
    end.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=end)
    try:
        yield link
    finally:
        link.close()
