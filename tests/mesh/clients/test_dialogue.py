"""One Acquire: whatever happens to its channel, whoever waits is told."""

import asyncio
import socket

import pytest

from mesh.client import connect
from mesh.clients.dialogue import Dialogue, Lost
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


async def test_a_question_on_a_channel_closed_while_it_connects_is_lost_and_the_end_is_told(eventually):
    ended: list[Dialogue] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel takes the connection, and nobody answers
        mute.setblocking(False)
        channel = connect(f"127.0.0.1:{mute.getsockname()[1]}")
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        dialogue = Dialogue(stub, ended.append, timeout_s=60, metadata=())
        asking = asyncio.create_task(dialogue.ask(scheduler_pb2.LeaseEvent()))
        connection, _ = await asyncio.get_running_loop().sock_accept(mute)
        with connection:
            await channel.close()
            async with asyncio.timeout(5):
                with pytest.raises(Lost):
                    await asking
    assert dialogue.over
    await eventually(lambda: ended == [dialogue])


async def test_a_question_asked_in_the_step_in_which_the_channel_closes_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        channel = connect(f"127.0.0.1:{mute.getsockname()[1]}")
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        dialogue = Dialogue(stub, lambda _: None, timeout_s=60, metadata=())
        closing = asyncio.create_task(channel.close())
        async with asyncio.timeout(5):
            with pytest.raises(Lost):
                await dialogue.ask(scheduler_pb2.LeaseEvent())
            await closing
