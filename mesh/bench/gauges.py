"""The most that a worker's gauge ever showed while something ran: its metrics page, read a few times a second."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from mesh.bench.report import CannotMeasure

EVERY_S = 0.2
READ_S = 5.0
USED_BLOCKS = 'shoal_worker_blocks{state="used"}'


@dataclass(slots=True)
class Peak:
    """`value` is the highest that was seen in `samples` looks."""

    value: float = 0.0
    samples: int = 0

    def take(self, value: float) -> None:
        self.value = max(self.value, value)
        self.samples += 1


@asynccontextmanager
async def peak_of(port: int, series: str) -> AsyncIterator[Peak]:
    """Watches `series` of the page on a local port from the block's beginning to its end, both looks included."""
    peak = Peak()
    peak.take(await read(port, series))
    watching = asyncio.create_task(_watch(peak, port, series))
    try:
        yield peak
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    peak.take(await read(port, series))


async def _watch(peak: Peak, port: int, series: str) -> None:
    """For ever. A look that fails ends it: the last look, which follows, then says so."""
    with suppress(CannotMeasure):
        while True:
            await asyncio.sleep(EVERY_S)
            peak.take(await read(port, series))


async def read(port: int, series: str) -> float:
    """A gauge's value now. Raises CannotMeasure if the page is not there or lacks it."""
    try:
        async with asyncio.timeout(READ_S):
            page = await _page(port)
    except (OSError, TimeoutError) as error:
        raise CannotMeasure(f"a worker's metrics page does not answer: {error}") from None
    line = re.search(rf"^{re.escape(series)} (\S+)$", page, flags=re.MULTILINE)
    if line is None:
        raise CannotMeasure(f"a worker's metrics page lacks {series}")
    return float(line[1])


async def _page(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n")
        return (await reader.read(-1)).decode(errors="replace")
    finally:
        writer.close()
        await writer.wait_closed()
