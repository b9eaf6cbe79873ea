"""What schedulers see of a real worker: who it is, what runs, which blocks it has; and how it follows their orders."""

import asyncio
from typing import Any

import pytest

from mesh.blocks import FORMAT_VERSION, chain_keys, namespace
from shoal.scheduler.v1 import scheduler_pb2
from shoal.types.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = types_pb2.SamplingParams(temperature=0, max_tokens=8000)


def cached_keys(loads: list[Any]) -> set[bytes]:
    """The prefix cache as a scheduler reads it out of all loads since Hello."""
    keys: set[bytes] = set()
    for load in loads:
        if load.snapshot:
            keys.clear()
        for blocks in load.blocks:
            keys -= {blocks.evicted[at : at + 16] for at in range(0, len(blocks.evicted), 16)}
            keys |= {blocks.stored[at : at + 16] for at in range(0, len(blocks.stored), 16)}
    return keys


async def test_hello_says_who_the_worker_is_and_where(rig: Any, eventually: Any) -> None:
    await eventually(lambda: rig.scheduler.hellos)
    hello = rig.scheduler.hellos[-1]  # a shared worker that stood still while others were tested has attached again
    info = rig.bridge.info
    assert (hello.worker_id, hello.model, hello.pool) == ("worker-under-test", "tiny", "default")
    assert hello.address == f"127.0.0.1:{rig.worker.port}"
    assert (hello.model_digest, hello.tokenizer_digest) == (info.model_digest, info.tokenizer_digest)
    assert (hello.geometry.layers, hello.geometry.kv_heads, hello.geometry.head_dim) == (2, 2, 8)
    assert hello.total_blocks == info.total_blocks > 0
    assert hello.context_tokens == 8192
    assert hello.block_format_version == FORMAT_VERSION
    assert "stop_choices" in hello.features


async def test_loads_are_numbered_without_a_gap_and_balance(rig: Any, eventually: Any) -> None:
    await eventually(lambda: len(rig.scheduler.loads) >= 3)
    last = rig.scheduler.loads[-1].seq
    loads = rig.scheduler.loads[-last:]  # since it has attached
    assert [load.seq for load in loads] == list(range(1, last + 1))
    total = rig.bridge.info.total_blocks
    assert {load.free_blocks + load.cached_blocks + load.used_blocks for load in loads} == {total}


async def test_a_running_request_is_reported_until_it_has_ended(rig: Any, eventually: Any) -> None:
    request = rig.request(sampling=LONG, attempt=3)
    call = rig.stub.Generate(request, timeout=30)
    reading = asyncio.ensure_future(call.read())
    mine = scheduler_pb2.Running(request_id=request.meta.request_id, attempt=3)
    await eventually(lambda: mine in rig.scheduler.loads[-1].running and rig.scheduler.loads[-1].used_blocks)
    await reading
    call.cancel()
    await eventually(lambda: mine not in rig.scheduler.loads[-1].running, timeout_s=2)
    await eventually(lambda: rig.scheduler.loads[-1].used_blocks == 0, timeout_s=2)


async def test_a_scheduler_knows_a_prompts_blocks_by_the_keys_that_a_gateway_makes(rig: Any, eventually: Any) -> None:
    prompt = [200 + at % 50 for at in range(100)]
    async for _ in rig.stub.Generate(rig.request(prompt_ids=prompt, cache_salt=b"tenant"), timeout=20):
        pass
    info = rig.bridge.info
    keys = set(chain_keys(namespace(info.model_digest, info.tokenizer_digest, "", b"tenant"), prompt))
    assert len(keys) == 6
    await eventually(lambda: keys <= cached_keys(rig.scheduler.loads))


async def test_a_stop_order_parks_the_attempt_and_no_other(rig: Any, eventually: Any) -> None:
    call = rig.stub.Generate(rig.request("to-park", 2, sampling=LONG), timeout=30)
    responses = [await call.read()]
    rig.scheduler.orders.put_nowait(stop("to-park", 1))
    rig.scheduler.orders.put_nowait(stop("unknown", 1))
    rig.scheduler.orders.put_nowait(stop("to-park", 2))
    while responses[-1] and not responses[-1].HasField("finished"):
        responses.append(await call.read())
    finished = responses[-1].finished
    assert finished.reason == types_pb2.FINISH_REASON_PARKED
    assert finished.completion_tokens == sum(len(response.tokens.ids) for response in responses)
    await eventually(lambda: rig.idle)


def stop(request_id: str, attempt: int) -> scheduler_pb2.WorkerOrder:
    return scheduler_pb2.WorkerOrder(
        stop=scheduler_pb2.Stop(request_id=request_id, attempt=attempt, reason="moved by a test")
    )


async def test_a_snapshot_that_was_asked_for_lists_the_whole_cache(rig: Any, eventually: Any) -> None:
    async for _ in rig.stub.Generate(rig.request(prompt_ids=range(64)), timeout=20):
        pass
    await eventually(lambda: rig.idle)
    before = len(rig.scheduler.loads)
    rig.scheduler.orders.put_nowait(scheduler_pb2.WorkerOrder(send_snapshot=scheduler_pb2.SendSnapshot()))
    await eventually(lambda: any(load.snapshot for load in rig.scheduler.loads[before:]))
    start = next(at for at, load in enumerate(rig.scheduler.loads) if at >= before and load.snapshot)
    await eventually(lambda: not rig.scheduler.loads[-1].snapshot)
    assert cached_keys(rig.scheduler.loads[start:]) == cached_keys(rig.scheduler.loads)
    assert cached_keys(rig.scheduler.loads[start:])
