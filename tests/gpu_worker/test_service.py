"""WorkerService over gRPC, with the real engine on a tiny model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from gpu_worker.engine.api import Logprob, TokensEvent
from gpu_worker.identity import Identity
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.record import Record
from gpu_worker.service import plan_of, said
from mesh.errors import error_of
from shoal.channel import MAX_MESSAGE_BYTES
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def unhurried(own_worker: Callable[..., Any], ready: Callable[..., Any]) -> AsyncIterator[Any]:
    """A worker whose long prompts take a second whatever the machine, for what happens meanwhile."""
    async with own_worker(kind="simulated", simulated_prefill_tokens_per_s=10_000) as rig:
        yield await ready(rig)


async def collect(call: Any) -> list[Any]:
    return [response async for response in call]


def ids_of(responses: list[Any], choice: int = 0) -> list[int]:
    """The ids of a choice; fails on a gap or a repeat."""
    ids: list[int] = []
    for response in responses:
        if response.HasField("tokens") and response.tokens.choice == choice:
            assert response.tokens.position == len(ids)
            ids += response.tokens.ids
    return ids


def finishes(responses: list[Any]) -> list[Any]:
    return [response.finished for response in responses if response.HasField("finished")]


async def error_from(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


def sampling(**fields: Any) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(**({"temperature": 0, "max_tokens": 16} | fields))


async def until_tokens(call: Any, count: int) -> int:
    """Read at least so many; how many it were, for a message may hold several."""
    seen = 0
    async for response in call:
        seen += len(response.tokens.ids)
        if seen >= count:
            return seen
    raise AssertionError(f"the stream ended after {seen} tokens")


async def test_an_answer_begins_with_accepted_and_ends_with_its_finish_and_exact_usage(rig: Any) -> None:
    responses = await collect(rig.stub.Generate(rig.request(), timeout=20))
    said = [response.WhichOneof("event") for response in responses if not response.HasField("progress")]
    assert said[0] == "accepted"
    assert said[-1] == "finished"
    assert len(ids_of(responses)) == 16
    [finished] = finishes(responses)
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.completion_tokens == finished.usage.completion_tokens == 16
    assert finished.usage.prompt_tokens == 8
    assert finished.usage.steps == 16
    assert 0 < finished.usage.median_step_ms <= finished.usage.max_step_ms
    accepted = next(response.accepted for response in responses if response.HasField("accepted"))
    assert accepted.precision == "fp32"
    assert len(accepted.model_digest) == 32


async def test_the_same_prompt_again_is_found_in_the_cache_and_answers_alike(rig: Any) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    first = await collect(rig.stub.Generate(rig.request(prompt_ids=prompt), timeout=20))
    again = await collect(rig.stub.Generate(rig.request(prompt_ids=prompt), timeout=20))
    assert ids_of(first) == ids_of(again)
    [cached] = finishes(again)[0].usage.cached
    assert cached.tier == types_pb2.KV_TIER_DEVICE
    assert cached.tokens == 39  # all but the last, which is computed for its logits


async def test_each_choice_has_its_own_text_and_finish_and_the_prompt_counts_once(rig: Any) -> None:
    request = rig.request(
        choices=[worker_pb2.Choice(index=index) for index in range(4)],
        sampling=sampling(temperature=1, seed=5, max_tokens=24),
    )
    responses = await collect(rig.stub.Generate(request, timeout=20))
    texts = [ids_of(responses, choice) for choice in range(4)]
    assert [len(text) for text in texts] == [24] * 4
    assert len({tuple(text) for text in texts}) == 4
    ends = finishes(responses)
    assert sorted(end.choice for end in ends) == [0, 1, 2, 3]
    assert ends[-1].usage.prompt_tokens == 8
    assert ends[-1].usage.completion_tokens == 96


async def test_a_resumed_answer_goes_on_as_it_would_have(rig: Any) -> None:
    drawn = sampling(temperature=1, seed=11, max_tokens=20)
    whole = ids_of(await collect(rig.stub.Generate(rig.request(sampling=drawn), timeout=20)))
    choices = [worker_pb2.Choice(index=0, emitted_ids=whole[:7])]
    rest = await collect(rig.stub.Generate(rig.request(attempt=2, choices=choices, sampling=drawn), timeout=20))
    resumed = [token for r in rest if r.HasField("tokens") for token in r.tokens.ids]
    assert whole[:7] + resumed == whole
    assert finishes(rest)[0].completion_tokens == 20
    assert finishes(rest)[0].usage.completion_tokens == 13


async def test_log_probabilities_come_one_per_id(rig: Any) -> None:
    responses = await collect(rig.stub.Generate(rig.request(sampling=sampling(top_logprobs=3)), timeout=20))
    for tokens in (response.tokens for response in responses if response.HasField("tokens")):
        assert [entry.token_id for entry in tokens.logprobs] == list(tokens.ids)
        assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in tokens.logprobs)


async def test_a_stop_string_met_in_the_text_ends_the_choice_with_exact_usage(rig: Any) -> None:
    request = rig.request(sampling=sampling(max_tokens=4000))
    call = rig.stub.Generate(request, timeout=20)
    await until_tokens(call, 6)
    stop = worker_pb2.StopChoicesRequest(
        request_id=request.meta.request_id, attempt=1, choices=[worker_pb2.StopChoice(choice=0, keep_tokens=4)]
    )
    await rig.stub.StopChoices(stop, timeout=5)
    [finished] = finishes(await collect(call))
    assert finished.reason == types_pb2.FINISH_REASON_STOP
    assert finished.completion_tokens == finished.usage.completion_tokens == 4


async def test_stopping_what_does_not_run_is_ignored(rig: Any) -> None:
    stop = worker_pb2.StopChoicesRequest(request_id="nobody", attempt=1, choices=[worker_pb2.StopChoice(choice=3)])
    await rig.stub.StopChoices(stop, timeout=5)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"worker_id": "its-predecessor"}, "worker"),
        ({"tokenizer_digest": b"other"}, "tokenizer"),
        ({"model_digest": b"other"}, "model digest"),
        ({"precision": "int4"}, "precision"),
        ({"adapter": "pirate"}, "adapter"),
        ({"required_features": ["telepathy"]}, "telepathy"),
        ({"meta": types_pb2.RequestMeta(model="another")}, "model"),
    ],
)
async def test_a_request_meant_for_another_worker_is_refused_as_a_mismatch(rig: Any, fields: Any, word: str) -> None:
    error = await error_from(rig.stub.Generate(rig.request(**fields), timeout=5))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_of(error).code == "mismatch"
    assert word in error.details()


async def test_a_request_meant_for_this_worker_by_every_pin_is_served(rig: Any) -> None:
    info = rig.bridge.info
    request = rig.request(
        worker_id="worker-under-test",
        model_digest=info.model_digest,
        precision="fp32",
        required_features=["seed", "logprobs"],
        meta=types_pb2.RequestMeta(model="tiny"),
    )
    assert finishes(await collect(rig.stub.Generate(request, timeout=20)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [999]}, "prompt_ids"),
        ({"prompt_ids": [1] * 9000}, "prompt_ids"),
        ({"request_id": "r" * 257}, "meta.request_id"),
        ({"cache_salt": b"s" * 257}, "cache_salt"),
        ({"choices": []}, "choices"),
        ({"choices": [worker_pb2.Choice(index=index) for index in range(5_000)]}, "choices"),
        ({"choices": [worker_pb2.Choice(index=1)] * 2}, "choices"),
        ({"sampling": sampling(temperature=-1)}, "temperature"),
        ({"sampling": sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": sampling(top_p=0)}, "top_p"),
        ({"sampling": sampling(max_tokens=0)}, "max_tokens"),
        ({"sampling": sampling(logit_bias={191222: -100})}, "logit_bias"),
        ({"sampling": sampling(stop_token_ids=[100_000])}, "stop_token_ids"),
        ({"sampling": sampling(top_logprobs=1_000_000)}, "top_logprobs"),
        ({"sampling": sampling(regex="")}, "regex"),
        ({"sampling": sampling(json_schema="{")}, "json_schema"),
        ({"sampling": sampling(temperature=3)}, "temperature"),
        ({"sampling": sampling(repetition_penalty=1e-38)}, "repetition_penalty"),
        ({"prompt_ids": [(1 << 32) - 1]}, "prompt_ids"),
    ],
)
async def test_a_bad_request_fails_alone_and_names_its_field(rig: Any, fields: Any, named: str) -> None:
    neighbour = asyncio.ensure_future(collect(rig.stub.Generate(rig.request(), timeout=20)))
    error = await error_from(rig.stub.Generate(rig.request(**fields), timeout=5))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(error).field == named
    assert len(ids_of(await neighbour)) == 16


async def test_a_newer_attempt_ends_the_older_one_with_aborted(rig: Any) -> None:
    older = rig.stub.Generate(rig.request("twice", 1, sampling=sampling(max_tokens=4000)), timeout=20)
    await until_tokens(older, 2)
    newer = asyncio.ensure_future(collect(rig.stub.Generate(rig.request("twice", 2), timeout=20)))
    error = await error_from(older)
    assert error.code() is grpc.StatusCode.ABORTED
    assert error_of(error).code == "superseded"
    assert len(ids_of(await newer)) == 16


@pytest.mark.parametrize("attempt", [1, 2])
async def test_the_same_or_an_older_attempt_is_refused_and_the_running_one_goes_on(rig: Any, attempt: int) -> None:
    running = rig.stub.Generate(rig.request("once", 2, sampling=sampling(max_tokens=400)), timeout=20)
    await until_tokens(running, 2)
    error = await error_from(rig.stub.Generate(rig.request("once", attempt), timeout=5))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert finishes(await collect(running))[0].completion_tokens == 400


async def test_a_client_that_is_gone_while_queued_frees_all_within_a_second(unhurried: Any, eventually: Any) -> None:
    await eventually(lambda: unhurried.idle)
    long = [unhurried.stub.Generate(unhurried.request(prompt_ids=[7 + n] * 5000), timeout=20) for n in range(3)]
    calls = [asyncio.ensure_future(collect(call)) for call in long]
    await eventually(lambda: unhurried.bridge.load.waiting_sequences and len(unhurried.bridge.running()) == 3)
    for call in calls:
        call.cancel()
    await eventually(lambda: unhurried.idle, timeout_s=1)
    await asyncio.wait(calls)


async def test_a_client_that_is_gone_in_prefill_frees_all_within_a_second(unhurried: Any, eventually: Any) -> None:
    await eventually(lambda: unhurried.idle)
    request = unhurried.request(prompt_ids=[9, 8] * 3500)
    call = unhurried.stub.Generate(request, timeout=20)
    reading = asyncio.ensure_future(collect(call))
    id_ = request.meta.request_id
    await eventually(lambda: 16 <= unhurried.bridge.load.computed.get(id_, 0) < 7000)
    reading.cancel()
    await eventually(lambda: unhurried.idle, timeout_s=1)
    await asyncio.wait([reading])


async def test_a_client_that_is_gone_after_five_tokens_frees_all_within_a_second(rig: Any, eventually: Any) -> None:
    await eventually(lambda: rig.idle)
    cancelled = rig.sample("requests_total", outcome="cancelled")
    choices = [worker_pb2.Choice(index=index) for index in range(4)]
    call = rig.stub.Generate(rig.request(choices=choices, sampling=sampling(max_tokens=4000)), timeout=20)
    await until_tokens(call, 5)
    neighbour = asyncio.ensure_future(collect(rig.stub.Generate(rig.request(), timeout=20)))
    call.cancel()
    assert len(ids_of(await neighbour)) == 16
    await eventually(lambda: rig.idle, timeout_s=1)
    assert rig.sample("requests_total", outcome="cancelled") == cancelled + 1


async def test_a_deadline_that_passes_frees_all_too(rig: Any, eventually: Any) -> None:
    error = await error_from(rig.stub.Generate(rig.request(sampling=sampling(max_tokens=8000)), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: rig.idle, timeout_s=1)


async def test_a_client_that_does_not_read_holds_up_nobody(rig: Any, eventually: Any) -> None:
    slow = rig.stub.Generate(rig.request(sampling=sampling(max_tokens=600)), timeout=30)
    seen = await until_tokens(slow, 1)
    assert len(ids_of(await collect(rig.stub.Generate(rig.request(), timeout=20)))) == 16
    await eventually(lambda: not rig.bridge.load.running)
    rest = await collect(slow)
    assert sum(len(response.tokens.ids) for response in rest) == 600 - seen


async def test_what_piled_up_for_a_slow_client_leaves_in_messages_far_under_the_limit(rig: Any) -> None:
    identity = Identity("w", rig.bridge.info)
    plan = plan_of(rig.request())
    logprobs = [Logprob(token % 256, -1.5, [(top, -2.5) for top in range(20)]) for token in range(5000)]
    event = TokensEvent("r", 1, 0, 0, [token % 256 for token in range(5000)], logprobs)
    responses = list(said([event], Record(plan, WorkerMetrics(CollectorRegistry())), identity))
    assert ids_of(responses) == event.ids
    assert sum(len(response.tokens.logprobs) for response in responses) == 5000
    assert max(response.ByteSize() for response in responses) < MAX_MESSAGE_BYTES / 8


async def test_a_client_that_is_gone_while_it_does_not_read_frees_all_too(rig: Any, eventually: Any) -> None:
    deaf = rig.stub.Generate(rig.request(sampling=sampling(max_tokens=8000, top_logprobs=20)), timeout=30)
    await eventually(lambda: max(rig.bridge.load.computed.values(), default=0) > 500)
    deaf.cancel()
    await eventually(lambda: rig.idle, timeout_s=1)


async def test_a_request_without_room_is_refused_with_the_time_to_come_back(unhurried: Any, eventually: Any) -> None:
    calls = [unhurried.stub.Generate(unhurried.request(prompt_ids=[40 + n] * 5400), timeout=20) for n in range(3)]
    reading = [asyncio.ensure_future(collect(call)) for call in calls]
    await eventually(lambda: len(unhurried.bridge.load.running) == 3)
    # The oldest and one beside it are computed, one waits: another fits behind it, and no more.
    reading.append(
        asyncio.ensure_future(collect(unhurried.stub.Generate(unhurried.request(prompt_ids=[49] * 8000), timeout=20)))
    )
    await eventually(lambda: len(unhurried.bridge.load.running) == 4)
    error = await error_from(unhurried.stub.Generate(unhurried.request(prompt_ids=[50] * 8000), timeout=20))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error_of(error).code == "no_room"
    assert error_of(error).retry_after_s > 0
    for task in reading:
        task.cancel()
    await eventually(lambda: unhurried.idle, timeout_s=1)
    await asyncio.wait(reading)


async def test_a_waiting_request_hears_progress_four_times_a_second(unhurried: Any) -> None:
    loop = asyncio.get_running_loop()
    last, gaps, phases = loop.time(), [], []
    async for response in unhurried.stub.Generate(unhurried.request(prompt_ids=[5, 6, 7] * 2700), timeout=30):
        gaps.append(loop.time() - last)
        last = loop.time()
        if response.HasField("progress"):
            phases.append((response.progress.phase, response.progress.computed_tokens))
    assert max(gaps) < 0.5  # twice the promise: these machines are shared
    assert worker_pb2.PHASE_PREFILL in {phase for phase, _ in phases}
    computed = [tokens for _, tokens in phases]
    assert computed == sorted(computed)
    assert computed[-1] > computed[0]


async def test_metrics_tell_what_was_computed_and_how_attempts_ended(rig: Any, eventually: Any) -> None:
    await eventually(lambda: rig.idle)
    before = {kind: rig.sample("tokens_total", kind=kind) for kind in ("prompt", "generated")}
    ended = rig.sample("requests_total", outcome="length")
    await collect(rig.stub.Generate(rig.request(prompt_ids=range(100, 140)), timeout=20))
    assert rig.sample("tokens_total", kind="generated") - before["generated"] == 16
    assert rig.sample("tokens_total", kind="prompt") - before["prompt"] == 40
    assert rig.sample("requests_total", outcome="length") == ended + 1
    assert rig.sample("engine_up") == 1
    states = {state: rig.sample("blocks", state=state) for state in ("free", "cached", "used", "total")}
    assert states["free"] + states["cached"] + states["used"] == states["total"] > 0
