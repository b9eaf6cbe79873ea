"""uvicorn inside our event loop: our signals, our logs, and our limits of what a connection may do."""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from gateway.http.app import Front
from gateway.http.connection import Connection, ConnectionLimits, Door

# Of the kernel, for each connection: without it a client that never reads is noticed megabytes later. Linux doubles it.
SEND_BUFFER_BYTES = 128 * 1024
MOST_CONNECTIONS = 8192


def connections_at_most(descriptors: int) -> int:
    """Half of what this process may open, so that gRPC and its own connections have theirs; 8,192 if that is less."""
    return MOST_CONNECTIONS if descriptors == resource.RLIM_INFINITY else min(descriptors // 2, MOST_CONNECTIONS)


def _door(app: Front, write_timeout_s: float) -> Door:
    limits = app.limits
    most = limits.max_connections or connections_at_most(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return Door(ConnectionLimits(most, limits.body_timeout_s, write_timeout_s), app.refused)


class HttpServer(uvicorn.Server):
    """`serve()` until `should_exit`; `port` is known once `started`. With `tls` it speaks HTTPS and nothing else."""

    def __init__(
        self, app: Front, host: str, port: int, write_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        protocol: Any = partial(Connection, _door(app, write_timeout_s))
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=protocol,
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
        for listener in self.servers[0].sockets:  # what it accepts inherits it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.listening.set()

    async def shutdown(self, sockets: Any = None) -> None:
        """Close every connection. An answer that still runs has had its time to end and its client does not read."""
        self._abort(lambda connection: connection.cycle is not None and not connection.cycle.response_complete)
        await super().shutdown(sockets)
        self._abort(lambda connection: True)

    def _abort(self, which: Callable[[Connection], bool]) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection) and which(connection):
                connection.transport.abort()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])
