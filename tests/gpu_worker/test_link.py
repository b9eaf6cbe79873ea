"""The worker's end of the engine's connection: order, back-pressure, and an end of either kind."""

import asyncio
import socket

import pytest
import uvloop

from gpu_worker.engine.frames import FramePort
from gpu_worker.link import linked

LARGE = 4 << 20


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine on the loop of the tests and on the loop of the services."""

    def on_loop(work):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(work, 20))

    return on_loop


def test_messages_are_heard_in_order_and_the_end_after_them(run):
    ours, theirs = socket.socketpair()
    engine = FramePort(theirs)
    heard = []

    async def work():
        async with linked(ours, heard.append) as link:
            for message in (b"a", b"b" * LARGE, b"c"):
                await asyncio.to_thread(engine.send, message)
            engine.close()
            await link.ended()
            await link.send(b"to nobody")

    run(work())
    assert [message[:1] for message in heard] == [b"a", b"b", b"c"]
    assert len(heard[1]) == LARGE


def test_an_engine_that_takes_nothing_holds_up_the_writer_and_loses_nothing(run):
    ours, theirs = socket.socketpair()
    engine = FramePort(theirs)

    async def work():
        async with linked(ours, print) as link:
            await link.send(b"x" * LARGE)
            second = asyncio.ensure_future(link.send(b"second"))
            await asyncio.wait([second], timeout=0.1)
            assert not second.done()
            received = [await asyncio.to_thread(engine.receive) for _ in range(2)]
            await second
            return [len(message) for message in received]

    assert run(work()) == [LARGE, 6]
    engine.close()


def test_a_message_that_nobody_understands_is_an_error_and_no_quiet_end(run):
    ours, theirs = socket.socketpair()
    engine = FramePort(theirs)

    def misunderstand(message):
        raise ValueError(message)

    async def work():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the loop's own report of it
        async with linked(ours, misunderstand) as link:
            engine.send(b"?")
            with pytest.raises(ValueError, match=r"\?"):
                await link.ended()

    run(work())
    engine.close()


def test_what_is_sent_together_is_there_together(run):
    ours, theirs = socket.socketpair()
    engine = FramePort(theirs)

    async def work():
        async with linked(ours, print) as link:
            await link.send(b"submit", b"park")
            first = await asyncio.to_thread(engine.receive)
            return first, engine.holds, engine.receive()

    assert run(work()) == (b"submit", True, b"park")
    engine.close()
