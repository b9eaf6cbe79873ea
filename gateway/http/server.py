"""uvicorn inside our event loop: our signals, our logs, and readers that do not read are cut off."""

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def _protocol(write_timeout_s: float) -> type[HttpToolsProtocol]:
    class Protocol(HttpToolsProtocol):
        """Aborts a connection whose client has read nothing for `write_timeout_s` while the buffer is full.

        What waits for such a client is bounded by the buffer: sends wait for it to drain.
        """

        _stuck: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stuck = self.loop.call_later(write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._forget()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _forget(self) -> None:
            if self._stuck is not None:
                self._stuck.cancel()
                self._stuck = None

    return Protocol


class HttpServer(uvicorn.Server):
    """`serve()` until `should_exit`; `port` is known once `started`. With `tls` it speaks HTTPS and nothing else."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, write_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=_protocol(write_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody asks who the client is
                timeout_graceful_shutdown=1,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair (mesh/server.py)."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: Any = None) -> None:
        """Close every connection. An answer that still runs has had its time to end and its client does not read."""
        self._abort(lambda connection: connection.cycle is not None and not connection.cycle.response_complete)
        await super().shutdown(sockets)
        self._abort(lambda connection: True)

    def _abort(self, which: Callable[[HttpToolsProtocol], bool]) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpToolsProtocol) and which(connection):
                connection.transport.abort()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])
