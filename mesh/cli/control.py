"""How commands talk to the supervisor of a running mesh: a Unix socket that only its owner may open, JSON a line.

A client sends one request and reads replies until Done or Refused. Work that was accepted goes on if the client leaves.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from mesh.cli.state import run_dir

REQUEST_S = 5.0
# A client's, for the first reply: a supervisor that was stopped still lets it connect.
FIRST_REPLY_S = 30.0
MOST_CLIENTS = 8
MOST_REQUEST_BYTES = 64 * 1024

logger = logging.getLogger("shoal.supervisor")


class Scale(msgspec.Struct, frozen=True, tag="scale", forbid_unknown_fields=True):
    """Have so many processes of each role; new ones must be ready within `timeout_s`."""

    wanted: dict[str, int]
    timeout_s: float = 180.0


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is sound; it is carried out as soon as those before it are."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A process (empty = the whole) is now so far: starting, ready, leaving, draining, stopped."""

    process: str
    state: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The mesh has so many processes now. `killed` names those that did not drain in time."""

    counts: dict[str, int]
    killed: list[str] = []


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The mesh is as it was."""

    message: str


Reply = Accepted | Progress | Done | Refused
Say = Callable[[Reply], None]
Handle = Callable[[Scale, Say], Awaitable[None]]


async def serve(handle: Handle) -> None:
    """Answer until cancelled. Requests still under way end then, their clients read the end of the connection."""
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(MOST_CLIENTS)
    with _listening() as listener:
        async with asyncio.TaskGroup() as group:
            while True:
                await free.acquire()
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors, for example
                    logger.warning("control socket: %s", error)
                    await asyncio.sleep(1)
                    free.release()
                    continue
                group.create_task(_answer(connection, handle)).add_done_callback(lambda _: free.release())


async def _answer(connection: socket.socket, handle: Handle) -> None:
    """One client's request. Replies are few and short, so they are never waited for: it may be gone."""
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MOST_REQUEST_BYTES)

    def say(reply: Reply) -> None:
        if not writer.is_closing():
            writer.write(msgspec.json.encode(reply) + b"\n")

    try:
        async with asyncio.timeout(REQUEST_S):
            line = await reader.readline()
        request = msgspec.json.decode(line, type=Scale)
    except (TimeoutError, ValueError, OSError, msgspec.MsgspecError) as error:
        say(Refused(f"not a request: {error}"))
    else:
        await handle(request, say)
    finally:
        writer.close()


@contextmanager
def _listening() -> Iterator[socket.socket]:
    with _address() as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with suppress(FileNotFoundError):
            os.unlink(address)
        os.fchmod(listener.fileno(), 0o600)  # before it has a name: nobody else can ever open it
        listener.bind(address)
        listener.listen(MOST_CLIENTS)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with suppress(FileNotFoundError):
                os.unlink(address)


@contextmanager
def _address() -> Iterator[str]:
    """The socket's path by way of its folder's descriptor: a Unix address has room for some hundred bytes only."""
    run_dir().mkdir(parents=True, exist_ok=True)
    folder = os.open(run_dir(), os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/control.sock"
    finally:
        os.close(folder)


def ask(request: Scale) -> Iterator[Reply]:
    """Send a request and give each reply as it comes, up to the last. Raises OSError if no supervisor listens.

    Only the first reply is due in FIRST_REPLY_S: how long the work may take is the request's to say.
    """
    with _address() as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        connection.settimeout(FIRST_REPLY_S)  # not before: with one, connecting does not wait for a place in line
        connection.sendall(msgspec.json.encode(request) + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                connection.settimeout(None)
                yield msgspec.json.decode(line, type=Reply)
