"""One HTTP connection: how long it may keep us waiting, and which one gives way when there are too many.

Every wait for the client ends: for a request's headers here, for its body in gateway/http/exchange.py, for it to read
what was written here again. A connection is idle while no request of it is under way; the longest idle gives way first.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.problems import error_body, error_headers, plain_error, status_of
from mesh.errors import Unavailable


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`most` connections at once. `head_timeout_s` is from the connection, or from the first byte after an answer, to
    the end of a request's headers; `write_timeout_s` how long a client may read nothing of what waits for it.
    """

    most: int
    head_timeout_s: float
    write_timeout_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a connection is told that gets no further."""

    status: int
    answer: bytes


@dataclass(frozen=True, slots=True)
class Door:
    """What the connections of one server share. `count` is told the status of each that was refused or cut."""

    limits: ConnectionLimits
    count: Callable[[int], None]
    idle: dict["Connection", None] = field(default_factory=dict)  # the longest idle first

    def make_room(self, connections: int) -> bool:
        """Whether there is room for the last of so many, now that the longest idle gave way if there was none."""
        if connections <= self.limits.most:
            return True
        if not self.idle:
            return False
        next(iter(self.idle)).cut(self.full())
        return True

    def full(self) -> Refusal:
        message = f"this gateway holds {self.limits.most} connections already"
        error = Unavailable(message, code="busy", retry_after_s=1)
        return _refusal(status_of(error), error_body(error), error_headers(error))

    def late(self) -> Refusal:
        message = f"the request's headers did not arrive within {self.limits.head_timeout_s:g} s"
        return _refusal(408, plain_error(message, "request_timeout"), [])


def _refusal(status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> Refusal:
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *headers,
    ]
    line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return Refusal(status, line + b"".join(name + b": " + value + b"\r\n" for name, value in fields) + b"\r\n" + body)


class Alarm:
    """Rings once, `after_s` after it was first set, unless it is cleared."""

    def __init__(self, loop: asyncio.AbstractEventLoop, after_s: float, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._after_s = after_s
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._after_s, self._ring)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Connection(HttpToolsProtocol):
    """What waits for a client that does not read is bounded by the buffer: sends wait for it to drain."""

    def __init__(self, door: Door, **given: Any) -> None:
        super().__init__(**given)
        self._door = door
        self._head_begun = False
        self._late = Alarm(self.loop, door.limits.head_timeout_s, lambda: self.cut(door.late()))
        self._unread = Alarm(self.loop, door.limits.write_timeout_s, lambda: self.transport.abort())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._door.make_room(len(self.connections)):
            self._head_begun = True  # whoever has just come is about to ask
            self.cut(self._door.full())
            return
        self._door.idle[self] = None
        self._late.set()

    def cut(self, refusal: Refusal) -> None:
        """Close an idle connection. One that has sent a part of a request is told why."""
        self._door.count(refusal.status)
        self._door.idle.pop(self, None)
        self._late.clear()
        if self._head_begun:
            self.transport.write(refusal.answer)
        self.transport.close()
        self._unread.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():  # it was no HTTP
            self._unread.set()
        elif self._is_idle:
            self._late.set()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_message_begin(self) -> None:
        self._head_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_begun = False
        self._late.clear()
        self._door.idle.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._unread.set()
        elif self._is_idle:
            self._door.idle[self] = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._unread.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.set()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.clear()
        if self.transport.is_closing():
            self._unread.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.idle.pop(self, None)
        self._late.clear()
        self._unread.clear()
        super().connection_lost(exc)
