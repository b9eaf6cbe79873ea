"""One keep-alive HTTP connection that sends a prepared request and reads its event stream.

Raw asyncio and the httptools parser, because a load generator on the cores it measures must cost next to nothing.
"""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from mesh.bench.answer import Outcome, SseReader

MOST_ERROR_BYTES = 64 << 10


class Exchange(asyncio.Protocol):
    """A connection and the one answer it is reading."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sse: SseReader | None = None
        self._outcome: Outcome | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now = 0.0
        self._error_body = b""
        self.idle_since = 0.0
        self.usable = True
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when it is closed

    async def ask(self, request: bytes, outcome: Outcome, gap: Callable[[float], None]) -> None:
        """Send `request` and read its answer into `outcome`. Cancelled, it closes the connection."""
        assert self._transport is not None
        self._outcome, self._sse = outcome, SseReader(outcome, gap)
        self._error_body = b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._outcome = self._ended = None
            self.idle_since = time.perf_counter()

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("broken HTTP", str(error))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self.lost.set_result(None)
        if self._outcome is not None and not self._read_to_the_end():
            self._fail("broken stream", str(exc or "the connection was closed in mid-answer"))

    # httptools

    def on_body(self, body: bytes) -> None:
        if self._sse is None or self._outcome is None:
            return
        if self._parser.get_status_code() == 200:
            self._sse.feed(body, self._now)
        elif len(self._error_body) < MOST_ERROR_BYTES:
            self._error_body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._outcome is None or self._sse is None:
            return
        if status != 200:
            self._outcome.fail(f"http {status}", self._error_body.decode(errors="replace"))
        elif not self._sse.done:
            self._outcome.fail("no [DONE]", "the body ended in good order and the event stream did not")
        self._end()

    def _read_to_the_end(self) -> bool:
        """A body without length or chunks ends with its connection."""
        if self._sse is not None and self._sse.done:
            self._end()
            return True
        return False

    def _fail(self, kind: str, detail: str) -> None:
        if self._outcome is not None:
            self._outcome.fail(kind, detail)
        self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
