"""Whole blocks between a worker and its engine process: raw frames over a socket of their own, beside the commands.

A megabyte must not stand before an abort, and what carries commands would copy it four times. A frame is a header and
a payload:

    LOAD    key, a block's bytes   → LOADED, one byte if the block was taken, none if not
    DUMP    key                    → DUMPED, the block's bytes, none if it is not there
    TOUCH   keys, concatenated       (no answer)

Answers come in the order of the questions. The worker asks for few at a time and always reads, so the engine is never
held up by more than one block on its way.
"""

import select
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from gpu_worker.engine.transfer import Transfer
from mesh.blocks import KEY_BYTES

HEADER = struct.Struct(f"<B{KEY_BYTES}sI")  # kind, key, payload bytes
NO_KEY = bytes(KEY_BYTES)
# Between two steps blocks take so much of the last step's time, and at least the floor: a step is never held up long.
STEP_SHARE = 0.25
FLOOR_S = 0.002
# With nothing to step for it may be longer, and the next block is waited for: a report for each costs the worker more.
IDLE_S, LINGER_S = 0.01, 0.002


class Kind(IntEnum):
    LOAD = 1
    DUMP = 2
    TOUCH = 3
    LOADED = 4
    DUMPED = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """`payload` is valid until the next frame is received."""

    kind: Kind
    key: bytes
    payload: memoryview


class BulkPort:
    """The engine's end. EOFError when the worker has gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._header = bytearray(HEADER.size)
        self._scratch = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def pending(self, within_s: float = 0.0) -> bool:
        return bool(self._poll.poll(within_s * 1000))

    def receive(self) -> Frame:
        self._fill(memoryview(self._header))
        kind, key, size = HEADER.unpack(self._header)
        if size > len(self._scratch):
            self._scratch = bytearray(size)
        payload = memoryview(self._scratch)[:size]
        self._fill(payload)
        return Frame(Kind(kind), key, payload)

    def send(self, kind: Kind, key: bytes, payload: bytes | memoryview = b"") -> None:
        self._end.sendall(HEADER.pack(kind, key, len(payload)))
        self._end.sendall(payload)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._end.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]


def carry(transfer: Transfer, port: BulkPort, within_s: float, linger_s: float = 0.0) -> None:
    """Answer what has arrived, for some `within_s` seconds; the rest waits for the next gap between steps.

    `linger_s` is how long to wait for each frame but the first.
    """
    until = time.monotonic() + within_s
    waiting = port.pending()
    while waiting:
        frame = port.receive()
        match frame.kind:
            case Kind.LOAD:
                port.send(Kind.LOADED, frame.key, b"\x01" if transfer.load(frame.key, frame.payload) else b"")
            case Kind.DUMP:
                found = transfer.dump(frame.key)
                port.send(Kind.DUMPED, frame.key, b"" if found is None else found)
            case Kind.TOUCH:
                keys = bytes(frame.payload)
                transfer.touch([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])
        waiting = time.monotonic() < until and port.pending(linger_s)
