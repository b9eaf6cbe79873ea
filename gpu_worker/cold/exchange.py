"""The worker's end of the blocks' socket (engine/bulk.py): asks the engine to take a block or to give one.

Answers come in the order of the questions. Whoever stops waiting for one loses nothing but the answer; once the engine
is gone every answer is empty.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence

from gpu_worker.engine.bulk import HEADER, NO_KEY, Kind

# Frames on their way to the socket. Askers are bounded on their own (reader, writer); this only has to be more.
FRAMES = 256


class Exchange:
    """Run `run` beside whoever asks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._frames: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(FRAMES)
        self._asked: deque[asyncio.Future[bytes]] = deque()
        self._gone = False

    async def load(self, key: bytes, payload: bytes) -> "asyncio.Future[bytes]":
        """Hand a block over. The answer, when it comes, is empty if the engine has it already or has no room."""
        return await self._ask(Kind.LOAD, key, payload)

    async def dump(self, key: bytes) -> "asyncio.Future[bytes]":
        """Ask for a block. The answer, when it comes, is its bytes; empty if the engine does not have it any more."""
        return await self._ask(Kind.DUMP, key)

    async def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks that should stay for what is loaded next."""
        if not self._gone:
            await self._frames.put(_frame(Kind.TOUCH, NO_KEY, b"".join(keys)))

    async def _ask(self, kind: Kind, key: bytes, payload: bytes = b"") -> "asyncio.Future[bytes]":
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._gone:
            await self._frames.put(_frame(kind, key, payload))
        if self._gone:
            answer.set_result(b"")
        else:
            self._asked.append(answer)  # at once after its frame: the order is the same
        return answer

    async def run(self) -> None:
        """Until the engine is gone or this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write())
            try:
                await self._read()
            finally:
                self._gone = True
                writing.cancel()
                while not self._frames.empty():  # whoever waits for a place in line gets it, and no for an answer
                    self._frames.get_nowait()
                for answer in self._asked:
                    _settle(answer, b"")
                self._asked.clear()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                header, payload = await self._frames.get()
                await loop.sock_sendall(self._end, header)
                if payload:
                    await loop.sock_sendall(self._end, payload)
        except OSError:
            return  # the reader tells

    async def _read(self) -> None:
        header = bytearray(HEADER.size)
        while await self._fill(header):
            _, _, size = HEADER.unpack(header)
            payload = bytearray(size)
            if not await self._fill(payload):
                return
            _settle(self._asked.popleft(), bytes(payload))

    async def _fill(self, buffer: bytearray) -> bool:
        """False if the engine is gone."""
        loop, view = asyncio.get_running_loop(), memoryview(buffer)
        try:
            while view:
                count = await loop.sock_recv_into(self._end, view)
                if not count:
                    return False
                view = view[count:]
        except OSError:
            return False
        return True


def _frame(kind: Kind, key: bytes, payload: bytes) -> tuple[bytes, bytes]:
    return HEADER.pack(kind, key, len(payload)), payload


def _settle(answer: asyncio.Future[bytes], payload: bytes) -> None:
    if not answer.done():
        answer.set_result(payload)
