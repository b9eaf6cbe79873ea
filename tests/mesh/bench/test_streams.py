"""Streams that a round needs, and the gauge that is watched meanwhile: what is waited for, and what ends the wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mesh.bench import gauges, prompts
from mesh.bench.answer import Ask
from mesh.bench.engine import streams
from mesh.bench.http_target import HttpTarget
from mesh.bench.report import CannotMeasure
from mesh.bench.target import TargetOptions


@asynccontextmanager
async def running(server, model: str, tokens: int) -> AsyncIterator[streams.Streams]:
    asks = [Ask(prompt=prompts.WORDS[0], output_tokens=tokens)] * 2
    async with (
        HttpTarget(server.url, TargetOptions(model=model, api="completions")) as target,
        streams.running(target, asks) as found,
    ):
        yield found


async def test_an_answer_that_ends_in_mid_round_is_no_stream(server):
    async with running(server, "good", 20) as found:
        with pytest.raises(CannotMeasure, match="shorter than the round"):
            await found.undisturbed(30)


async def test_a_stream_that_breaks_says_how(server):
    async with running(server, "breaks", 20) as found:
        with pytest.raises(CannotMeasure, match="broken stream"):
            await found.undisturbed(30)


async def test_streams_that_give_nothing_are_not_waited_for_for_ever(server, monkeypatch):
    monkeypatch.setattr(streams, "WAIT_S", 0.2)
    async with running(server, "hangs", 20) as found:
        with pytest.raises(CannotMeasure, match="0 of 2 streams run"):
            await found.undisturbed(30)


@asynccontextmanager
async def page(*values: float) -> AsyncIterator[int]:
    """A metrics page whose gauge shows one value after the other, the last for ever."""
    left = list(values)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        value = left.pop(0) if len(left) > 1 else left[0]
        writer.write(f'HTTP/1.0 200 OK\r\n\r\nshoal_worker_blocks{{state="used"}} {value}\n'.encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_peak_is_the_most_that_was_seen(monkeypatch, eventually):
    monkeypatch.setattr(gauges, "EVERY_S", 0.01)
    async with page(1.0, 5.0, 9.0, 3.0) as port:
        async with gauges.peak_of(port, gauges.USED_BLOCKS) as peak:
            await eventually(lambda: peak.samples >= 4)
        assert peak.value == 9.0


async def test_a_gauge_that_is_not_there_cannot_be_watched():
    async with page(1.0) as port:
        with pytest.raises(CannotMeasure, match="lacks shoal_worker_nothing"):
            await gauges.read(port, "shoal_worker_nothing")
    with pytest.raises(CannotMeasure, match="does not answer"):
        await gauges.read(port, gauges.USED_BLOCKS)


async def test_idle_waits_until_the_worker_runs_nothing():
    async with page(2.0, 1.0, 0.0) as port, asyncio.timeout(10):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "RUNNING", gauges.USED_BLOCKS)
            await streams.idle(port)
            assert await gauges.read(port, gauges.USED_BLOCKS) == 0.0
