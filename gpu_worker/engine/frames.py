"""Messages over a stream socket between a worker and its engine process: four bytes of length, then the message.

Both ends cut what arrives by `Frames`. The engine's end blocks (`FramePort`); the worker's is asyncio's (link.py).
"""

import select
import socket
import struct
from collections import deque

HEADER = struct.Struct("<I")
# One read takes a step's report, or many commands, whole.
READ_BYTES = 1 << 18


def framed(message: bytes) -> bytes:
    """The message as it travels."""
    return HEADER.pack(len(message)) + message


class Frames:
    """Cuts a stream of bytes into messages; what is unfinished waits for the rest."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        messages: list[bytes] = []
        at, have = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while have - at >= HEADER.size:
                end = at + HEADER.size + HEADER.unpack_from(view, at)[0]
                if end > have:
                    break
                messages.append(bytes(view[at + HEADER.size : end]))
                at = end
        del self._buffer[:at]
        return messages


class FramePort:
    """An end that blocks. EOFError once the other end is closed and all it said was received."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._poll = select.poll()  # kept: to make one for each look costs more than the look
        self._poll.register(end, select.POLLIN)
        self._frames = Frames()
        self._received: deque[bytes] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def holds(self) -> bool:
        """Whether a whole message was read already, of which the socket says nothing any more."""
        return bool(self._received)

    def pending(self, within_s: float = 0.0) -> bool:
        """Whether there is a message, the beginning of one, or the end."""
        return self.holds or bool(self._poll.poll(within_s * 1000))

    def receive(self) -> bytes:
        while not self._received:
            data = self._end.recv(READ_BYTES)
            if not data:
                raise EOFError
            self._received += self._frames.feed(data)
        return self._received.popleft()

    def send(self, message: bytes) -> None:
        """Waits while the other end is slow to read."""
        self._end.sendall(framed(message))

    def close(self) -> None:
        self._end.close()
