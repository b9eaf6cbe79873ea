"""A whole worker around the simulated engine: it says so to everyone who asks, and its answers survive a move."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")
SETTINGS = {"kind": "simulated", "simulated_step_ms": 1, "simulated_kv_bytes_per_token": 1024}
DRAWN = types_pb2.SamplingParams(temperature=1, seed=5, max_tokens=40)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def simulated(own_worker: Callable[..., Any], ready: Callable[..., Any]) -> AsyncIterator[Any]:
    async with own_worker(**SETTINGS) as rig:
        yield await ready(rig)


async def answer(rig: Any, request: worker_pb2.GenerateRequest) -> list[int]:
    ids: list[int] = []
    async for response in rig.stub.Generate(request, timeout=30):
        ids += response.tokens.ids
    return ids


async def test_hello_and_metrics_say_that_it_is_simulated(simulated: Any, eventually: Any) -> None:
    await eventually(lambda: simulated.scheduler.hellos)
    [hello] = simulated.scheduler.hellos
    assert hello.simulated
    assert (hello.model, hello.precision, hello.total_blocks) == ("tiny", "simulated", 512)
    assert simulated.sample("simulated") == 1
    facts = {"model": "tiny", "architecture": "LlamaForCausalLM", "precision": "simulated", "device": "simulated"}
    assert simulated.sample("info", **facts, preset="mixed", policy="continuous", simulated="true") == 1


async def test_an_answer_that_was_cut_goes_on_as_it_would_have(simulated: Any) -> None:
    whole = await answer(simulated, simulated.request(sampling=DRAWN))
    assert len(whole) == 40
    rest = simulated.request(
        attempt=2, sampling=DRAWN, choices=[worker_pb2.Choice(index=0, emitted_ids=whole[:13])], precision="simulated"
    )
    assert await answer(simulated, rest) == whole[13:]


async def test_log_probabilities_are_an_invalid_argument_that_names_the_field(simulated: Any) -> None:
    sampling = types_pb2.SamplingParams(max_tokens=4, top_logprobs=2)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer(simulated, simulated.request(sampling=sampling))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "logprobs" in (raised.value.details() or "")


async def test_an_answer_begun_on_real_weights_is_not_taken_over(simulated: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await answer(simulated, simulated.request(sampling=DRAWN, precision="fp32"))
    assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION
