"""The one resume path: whatever ends an attempt, the client sees one unbroken stream, or an error within seconds."""

import asyncio
import re
import time

import pytest

from mesh.blocks import chain_keys
from mesh.errors import Internal, Mismatch, Overloaded, Unavailable
from shoal.scheduler.v1 import scheduler_pb2 as sched
from shoal.types.v1 import types_pb2 as types

TEXT = "one two three four five six seven eight nine ten"


@pytest.fixture
def answer(ids_of):
    return ids_of(TEXT)


async def test_a_worker_that_breaks_in_mid_stream_is_followed_by_another(mesh, play, answer, ask):
    mesh.worker.scripts = [play.first(4, play.says(answer), play.resets)]
    second = await mesh.add_worker(play.says(answer))
    stream = await ask(stream=True, seed=5, stream_options={"include_usage": True})
    assert (stream.text(), stream.reason(), stream.done) == (TEXT, "stop", True)
    assert stream.usage["completion_tokens"] == len(answer)
    [resumed] = second.requests
    assert list(resumed.choices[0].emitted_ids) == answer[:3]
    assert (resumed.meta.attempt, resumed.sampling.seed) == (2, 5)
    assert (resumed.model_digest, resumed.precision) == (b"weights", "fp32")
    [failed] = mesh.scheduler.of_kind("failed")
    assert (failed.kind, failed.worker_id, failed.emitted_tokens) == (sched.FAILURE_KIND_RESET, "w1", 3)


async def test_a_killed_worker_is_followed_by_another(mesh, play, answer, ask):
    mesh.worker.scripts = [play.first(4, play.says(answer), play.progresses)]
    second = await mesh.add_worker(play.says(answer))
    third = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask(stream=True, heard=lambda line: "three" in line and third.set()))
        await third.wait()
        await mesh.worker.kill()
    stream = asking.result()
    assert (stream.text(), stream.reason()) == (TEXT, "stop")
    assert list(second.requests[0].choices[0].emitted_ids) == answer[:3]


async def test_a_hung_worker_is_given_up_after_its_silence(mesh, play, answer, ask):
    mesh.worker.scripts = [play.first(4, play.says(answer), play.hangs)]
    await mesh.add_worker(play.says(answer))
    began = time.monotonic()
    stream = await ask(stream=True)
    assert stream.text() == TEXT
    assert 1.4 < time.monotonic() - began < 4
    assert mesh.scheduler.of_kind("failed")[0].kind == sched.FAILURE_KIND_HUNG


async def test_an_address_where_nobody_listens_is_a_failure_to_connect(mesh, play, answer, ask):
    await mesh.worker.kill()
    await mesh.add_worker(play.says(answer))
    assert (await ask(stream=True)).text() == TEXT
    assert mesh.scheduler.of_kind("failed")[0].kind == sched.FAILURE_KIND_CONNECT


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Overloaded("full", retry_after_s=7), sched.REFUSED_CAUSE_NO_ROOM),
        (Unavailable("leaving", code="draining"), sched.REFUSED_CAUSE_DRAINING),
        (Unavailable("loading", code="not_ready"), sched.REFUSED_CAUSE_NOT_READY),
        (Mismatch("another model"), sched.REFUSED_CAUSE_MISMATCH),
    ],
    ids=lambda value: str(value),
)
async def test_a_refusal_is_told_with_its_cause_and_placed_again(mesh, play, answer, ask, error, cause):
    mesh.worker.scripts = [play.raises(error), play.says(answer)]
    response = await ask()
    assert response.json()["choices"][0]["message"]["content"] == TEXT
    [refused] = mesh.scheduler.of_kind("refused")
    assert (refused.cause, refused.attempt) == (cause, 1)
    assert refused.retry_after_ms == (7000 if error.retry_after_s else 0)
    assert mesh.scheduler.of_kind("failed") == []


async def test_a_parked_request_goes_on_elsewhere_with_exact_usage(mesh, play, answer, ask):
    parked = play.says(answer[:5], reason=types.FINISH_REASON_PARKED)
    mesh.worker.scripts = [parked, play.says(answer)]
    stream = await ask(stream=True, stream_options={"include_usage": True})
    assert (stream.text(), stream.reason()) == (TEXT, "stop")
    assert stream.usage["completion_tokens"] == len(answer)
    [event] = mesh.scheduler.of_kind("parked")
    assert event.emitted_tokens == 5


async def test_the_blocks_that_a_parked_answer_added_are_named_for_placement(mesh, play, ids_of, ask):
    answer = ids_of(TEXT * 5)
    parked = play.says(answer[:40], reason=types.FINISH_REASON_PARKED)
    mesh.worker.scripts = [parked, play.says(answer)]
    assert (await ask("/v1/completions", prompt=list(range(20, 40)), max_tokens=500)).status_code == 200
    root = mesh.gateway.core.catalogue.namespace("smollm2-135m", mesh.worker.requests[0].cache_salt)
    keys = chain_keys(root, [*range(20, 40), *answer[:40]])
    [opened] = mesh.scheduler.of_kind("open")
    [event] = mesh.scheduler.of_kind("parked")
    assert opened.demand.block_keys + event.more_block_keys == b"".join(keys)
    assert len(keys) == 3


async def test_only_unfinished_choices_are_sent_to_the_next_worker(mesh, play, ids_of, answer, ask):
    short = ids_of("hi")

    async def one_ends_then_breaks(worker, request, context):
        yield play.accepted()
        yield play.tokens(1, 0, short)
        yield play.finished(request, 1, len(short))
        yield play.tokens(0, 0, answer[:2])
        async for response in play.resets(worker, request, context):
            yield response

    mesh.worker.scripts = [one_ends_then_breaks]
    second = await mesh.add_worker(play.says(answer, short))
    stream = await ask(stream=True, n=2, stream_options={"include_usage": True})
    assert (stream.text(0), stream.text(1)) == (TEXT, "hi")
    assert [choice.index for choice in second.requests[0].choices] == [0]
    assert stream.usage["completion_tokens"] == len(answer) + len(short)


@pytest.mark.parametrize("shift", [-1, 1], ids=["repeat", "gap"])
async def test_a_repeat_or_gap_in_the_tokens_is_never_shown(mesh, play, answer, ask, shift):
    async def shifted(worker, request, context):
        yield play.accepted()
        yield play.tokens(0, 0, answer[:3])
        yield play.tokens(0, 3 + shift, answer[3 + shift :])

    mesh.worker.scripts = [shifted]
    await mesh.add_worker(play.says(answer))
    assert (await ask(stream=True)).text() == TEXT
    assert mesh.scheduler.of_kind("failed")[0].kind == sched.FAILURE_KIND_PROTOCOL


async def test_a_stream_that_ends_before_its_choices_is_resumed(mesh, play, answer, ask):
    async def stops_talking(worker, request, context):
        yield play.accepted()
        yield play.tokens(0, 0, answer[:3])

    mesh.worker.scripts = [stops_talking]
    await mesh.add_worker(play.says(answer))
    assert (await ask(stream=True)).text() == TEXT


async def test_the_only_worker_lost_in_mid_stream_is_an_error_event_and_done(mesh, play, answer, ask, eventually):
    mesh.worker.scripts = [play.first(4, play.says(answer), play.progresses)]
    asking = asyncio.create_task(ask(stream=True))
    await eventually(lambda: mesh.worker.running)
    began = time.monotonic()
    await mesh.worker.kill()
    stream = await asking
    assert time.monotonic() - began < 3
    assert TEXT.startswith(stream.text())
    assert stream.error["code"] == "worker_lost"
    assert re.search(r"in 0\.\d s none came", stream.error["message"])
    assert stream.done
    await eventually(lambda: not mesh.scheduler.leases)


@pytest.fixture
def breaks_and_leaves_nobody(mesh, play, answer):
    """Three tokens, then the worker breaks, and the scheduler has none to give until its gate is opened."""

    async def breaks(worker, request, context):
        mesh.scheduler.open_gate.clear()
        async for response in play.first(4, play.says(answer), play.resets)(worker, request, context):
            yield response

    return breaks


async def test_an_answer_that_waits_for_a_worker_goes_on_when_one_comes(
    mesh, play, answer, ask, eventually, breaks_and_leaves_nobody
):
    mesh.worker.scripts = [breaks_and_leaves_nobody]
    asking = asyncio.create_task(ask(stream=True, stream_options={"include_usage": True}))
    await eventually(lambda: mesh.scheduler.of_kind("failed"))
    later = await mesh.add_worker(play.says(answer))
    mesh.scheduler.open_gate.set()
    stream = await asking
    assert (stream.text(), stream.reason(), stream.error) == (TEXT, "stop", None)
    assert stream.usage["completion_tokens"] == len(answer)
    assert list(later.requests[0].choices[0].emitted_ids) == answer[:3]


async def test_an_answer_that_waits_for_a_worker_ends_with_its_deadline(
    mesh, ask, eventually, breaks_and_leaves_nobody
):
    hasty = await mesh.start_gateway(request_timeout_s=1)
    await eventually(lambda: not hasty.missing)
    mesh.worker.scripts = [breaks_and_leaves_nobody]
    stream = await ask(gateway=hasty, stream=True)
    assert stream.error["type"] == "timeout_error"
    assert stream.done
    await eventually(lambda: not mesh.scheduler.leases)


async def test_a_client_that_hangs_up_while_its_answer_waits_for_a_worker_leaves_no_lease(
    mesh, ask, eventually, breaks_and_leaves_nobody
):
    mesh.worker.scripts = [breaks_and_leaves_nobody]
    asking = asyncio.create_task(ask(stream=True))
    await eventually(lambda: mesh.scheduler.of_kind("failed"))
    asking.cancel()
    await eventually(lambda: not mesh.scheduler.leases, timeout_s=2)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_only_worker_lost_before_the_first_token_is_a_true_502(mesh, play, ask, stream):
    mesh.worker.scripts = [play.first(1, play.says([1, 2]), play.resets)]
    response = await ask(stream=stream)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "worker_lost"


async def test_lost_between_the_last_token_and_the_finish_is_an_error_when_nobody_can_say_how_it_ended(
    mesh, play, answer, ask
):
    mesh.worker.scripts = [play.first(1 + len(answer), play.says(answer), play.resets)]
    stream = await ask(stream=True)
    assert stream.text() == TEXT
    assert stream.error["code"] == "worker_lost"
    assert stream.done


async def test_lost_after_its_stop_string_was_complete_is_a_good_end(mesh, play, ids_of, ask):
    answer = ids_of("ABC STOP")
    mesh.worker.scripts = [play.first(1 + len(answer), play.says(answer), play.resets)]
    stream = await ask(stream=True, stop=["STOP"], stream_options={"include_usage": True})
    assert (stream.text(), stream.reason()) == ("ABC ", "stop")
    assert stream.error is None
    assert stream.usage["completion_tokens"] == len(answer)


async def test_a_request_that_fails_in_a_step_twice_is_an_internal_error(mesh, play, answer, ask):
    mesh.worker.scripts = [play.raises(Internal("boom", code="step_error"))]
    await mesh.add_worker(play.raises(Internal("boom", code="step_error")))
    await mesh.add_worker(play.says(answer))
    response = await ask()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "step_error"
    assert mesh.workers[2].requests == []


async def test_a_choice_that_ends_in_error_is_tried_once_more(mesh, play, answer, ask):
    async def fails(worker, request, context):
        yield play.accepted()
        yield play.finished(request, 0, 0, types.FINISH_REASON_ERROR, "out of memory")

    mesh.worker.scripts = [fails]
    await mesh.add_worker(play.says(answer))
    assert (await ask()).json()["choices"][0]["message"]["content"] == TEXT
    assert mesh.scheduler.of_kind("failed")[0].kind == sched.FAILURE_KIND_STEP_ERROR


async def test_no_worker_at_all_is_a_503_that_says_when_to_come_back(mesh, ask):
    mesh.scheduler.workers.clear()
    response = await ask()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"


async def test_a_lost_scheduler_does_not_touch_a_running_stream_and_another_adopts(mesh, play, answer, ask, eventually):
    goes_on = asyncio.Event()

    async def waits(worker, request, context):
        yield play.accepted()
        yield play.tokens(0, 0, answer[:3])
        async for response in play.progresses(worker, request, context):
            yield response
            if goes_on.is_set():
                break
        yield play.tokens(0, 3, answer[3:])
        yield play.finished(request, 0, len(answer))

    mesh.worker.scripts = [waits]
    asking = asyncio.create_task(ask(stream=True))
    await eventually(lambda: mesh.worker.running)
    port = int(mesh.scheduler.address.rpartition(":")[2])
    await mesh.scheduler.kill()
    successor = play.Scheduler(mesh.scheduler.digest)
    successor.workers = mesh.workers
    await successor.start(port)
    mesh.stack.push_async_callback(successor.kill)
    await eventually(lambda: successor.of_kind("adopt"))
    goes_on.set()
    stream = await asking
    assert (stream.text(), stream.reason(), len(mesh.worker.requests)) == (TEXT, "stop", 1)
    [adopt] = successor.of_kind("adopt")
    assert (adopt.worker.worker_id, adopt.attempt, adopt.demand.choices) == ("w1", 1, 1)
    assert adopt.demand.precision == "fp32", "what began in these numerics goes on in them"
    await eventually(lambda: successor.of_kind("finished"))


async def test_a_queued_request_is_queued_again_with_its_age_when_the_scheduler_is_back(
    mesh, play, answer, ask, eventually
):
    mesh.worker.scripts = [play.says(answer)]
    mesh.scheduler.open_gate.clear()
    asking = asyncio.create_task(ask(stream=True))
    await eventually(lambda: mesh.scheduler.of_kind("open"))
    port = int(mesh.scheduler.address.rpartition(":")[2])
    await mesh.scheduler.kill()
    successor = play.Scheduler(mesh.scheduler.digest)
    successor.workers = mesh.workers
    await successor.start(port)
    mesh.stack.push_async_callback(successor.kill)
    assert (await asking).text() == TEXT
    [again] = successor.of_kind("open")
    assert again.waited_ms > 0


async def test_the_lease_is_told_what_was_used(mesh, play, answer, ask, eventually):
    mesh.worker.scripts = [play.says(answer, cached=16)]
    await ask()
    [finished] = await eventually(lambda: mesh.scheduler.of_kind("finished"))
    assert finished.outcome == sched.OUTCOME_COMPLETED
    assert finished.usage.completion_tokens == len(answer)
    [opened] = mesh.scheduler.of_kind("open")
    assert opened.demand.prompt_tokens == len(mesh.worker.requests[0].prompt_ids)
    assert len(opened.demand.block_keys) == 16 * (opened.demand.prompt_tokens // 16)


async def test_a_wait_longer_than_the_queue_timeout_is_a_429(mesh, ask):
    impatient = await mesh.start_gateway(queue_timeout_s=0.3)
    mesh.scheduler.open_gate.clear()
    response = await ask(gateway=impatient)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


async def test_the_deadline_ends_a_request_at_every_stage(mesh, play, answer, ask, eventually):
    hasty = await mesh.start_gateway(request_timeout_s=0.5)
    await eventually(lambda: not hasty.missing)
    mesh.worker.scripts = [play.progresses, play.first(4, play.says(answer), play.progresses)]
    assert (await ask(gateway=hasty)).status_code == 504
    stream = await ask(gateway=hasty, stream=True)
    assert stream.error["type"] == "timeout_error"
    assert stream.done
    await eventually(lambda: not mesh.worker.running)


async def test_a_gateway_without_a_scheduler_says_503_within_its_patience(mesh, play, text_model, ask):
    async with play.serving("127.0.0.1:1", text_model, no_scheduler_s=0.1) as lonely:
        response = await ask(gateway=lonely)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
