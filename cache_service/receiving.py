"""Bundles out of a stream of pieces, one at a time, for which memory was set aside before its second piece.

One stream is one namespace and one geometry: a worker stores for one tenant at a time, and a piece that strayed into
another's stream is refused. Its failure leaves what was whole before it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from cache_service.budget import Budget
from mesh.errors import DeadlineExceeded, InvalidRequest
from mesh.kv import Bundle, KvGeometry
from mesh.kv_wire import Assembly

# A cancelled call reads as a stream that ended; so soon afterwards its task is cancelled, and it was no bad input.
HANG_UP_S = 0.05

Pieces = AsyncIterator[Any]  # of shoal.cache.v1.Chunk
Origin = tuple[bytes, KvGeometry]


class Receiver:
    """Reads `pieces`. A bundle may have `most_bytes`, and be whole within `stall_s`."""

    def __init__(self, pieces: Pieces, most_bytes: int, stall_s: float, memory: Budget) -> None:
        self._pieces = aiter(pieces)
        self._most_bytes = most_bytes
        self._stall_s = stall_s
        self._memory = memory
        self._origin: Origin | None = None

    async def bundles(self) -> AsyncGenerator[Bundle, None]:
        """Until the stream ends. Raises InvalidRequest, DeadlineExceeded, Overloaded."""
        while (first := await self._next(self._deadline())) is not None:
            assembly = Assembly(first, self._most_bytes)
            self._check_origin((assembly.header.namespace, assembly.geometry))
            async with self._memory.hold(assembly.geometry.bundle_bytes):
                due = self._deadline()
                while not assembly.whole:
                    piece = await self._next(due)
                    if piece is None:
                        await asyncio.sleep(HANG_UP_S)
                        raise assembly.cut("the stream ends")
                    assembly.add(piece)
                yield assembly.bundle()

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._stall_s

    async def _next(self, due: float) -> Any:
        try:
            async with asyncio.timeout_at(due):
                return await anext(self._pieces, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no whole bundle within {self._stall_s:g} s", code="stalled") from None

    def _check_origin(self, origin: Origin) -> None:
        self._origin = self._origin or origin
        for name, first, found in zip(("header.namespace", "header"), self._origin, origin, strict=True):
            if first != found:
                what = "namespace" if name == "header.namespace" else "geometry"
                raise InvalidRequest(f"{name}: one stream has one {what}", field=name, code="foreign")
