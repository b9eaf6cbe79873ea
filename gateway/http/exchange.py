"""One HTTP exchange at the level of ASGI: the body with its limits, the client's hang-up, and the bytes of the answer.

Raw ASGI, because an answer is hundreds of small sends and a hang-up must be seen between any two of them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.http.problems import error_body, error_headers, status_of
from mesh.errors import PayloadTooLarge, ShoalError

Headers = list[tuple[bytes, bytes]]
_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
# A comment, which clients skip: shows proxies that the stream lives.
WAITING = b": waiting\n\n"
LEAST_SILENCE_S = 1.0


class ClientGone(Exception):
    """The client hung up, or has not read for too long."""


class BodyLate(Exception):
    """The body did not come in time. HTTP's own error, a 408: gRPC reads a message before there is a call."""


def headers_of(scope: Scope) -> dict[str, str]:
    """The request's headers by lower-case name; of a repeated one the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


async def read_body(scope: Scope, receive: Receive, most_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises PayloadTooLarge as soon as that is known, BodyLate if it does not come in time."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > most_bytes:
        raise _too_large(most_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most_bytes:
                    raise _too_large(most_bytes)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise BodyLate(f"the body did not arrive within {timeout_s:g} s") from None


def _too_large(most_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request is larger than {most_bytes} bytes")


class Reply:
    """The answer's bytes. `committed` once the status is out; `complete` once the last byte is."""

    def __init__(self, send: Send) -> None:
        self.committed = False
        self.complete = False
        self.headers: Headers = []
        self.sends = 0  # parts of the body that were begun
        self._send = send
        self._one = asyncio.Lock()  # a sign of life may meet the stream's own parts

    async def whole(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """An answer in one piece."""
        self.committed = self.complete = True
        length = (b"content-length", str(len(body)).encode())
        all_headers = [(b"content-type", b"application/json"), length, *self.headers, *(headers or [])]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body})

    async def error(self, error: ShoalError) -> None:
        """A true status if none is out yet, else an event in the stream and its end."""
        body = error_body(error)
        if self.committed:
            await self.last(b"data: " + body + b"\n\n" + DONE)
        else:
            await self.whole(status_of(error), body, error_headers(error))

    async def commit(self) -> None:
        """Send the stream's status, if not yet done."""
        if self.committed:
            return
        self.committed = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_SSE, *self.headers]})

    async def write(self, data: bytes) -> None:
        """More of the stream. Waits while the client reads more slowly than we write."""
        self.sends += 1
        async with self._one:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def last(self, data: bytes) -> None:
        """The end of the stream."""
        self.complete = True
        async with self._one:
            await self._send({"type": "http.response.body", "body": data})

    async def sign_of_life(self) -> None:
        """A comment, and the status before it."""
        await self.commit()
        if not self.complete:
            await self.write(WAITING)


class Watch:
    """Sees the hang-up while the answer is made, and gives signs of life in a stream that says nothing."""

    def __init__(self, receive: Receive, reply: Reply) -> None:
        self._receive = receive
        self._reply = reply

    async def hangup(self, silence_s: float | None) -> None:
        """Raises ClientGone when the client hangs up before the answer is complete; else ends with the connection.

        A sign of life follows each `silence_s` without a part of the answer; None = there are none.
        """
        here = True
        while here:
            sent = self._reply.sends
            try:
                async with asyncio.timeout(silence_s):
                    await self._gone()
                here = False
            except TimeoutError:
                silence_s = max(silence_s or 0.0, LEAST_SILENCE_S)
                if self._reply.sends == sent:
                    await self._reply.sign_of_life()
        if not self._reply.complete:
            raise ClientGone

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def until_gone(watch: Watch, silence_s: float | None, work: Callable[[], Awaitable[Any]]) -> bool:
    """Run `work` until it ends or the client hangs up, which cancels it. False if the client went."""
    here = True
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch.hangup(silence_s))
            await work()
            watching.cancel()
    except* ClientGone:
        here = False
    return here
