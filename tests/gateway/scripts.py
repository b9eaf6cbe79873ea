"""What a scripted worker may say to one Generate: a script is an async generator of its responses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from mesh.errors import ShoalError, errors_as_status
from shoal.types.v1 import types_pb2 as types
from shoal.worker.v1 import worker_pb2 as work

if TYPE_CHECKING:
    from .scripted_peers import ScriptedWorker

Script = Callable[["ScriptedWorker", work.GenerateRequest, Any], AsyncIterator[work.GenerateResponse]]


def accepted(cached: int = 0) -> work.GenerateResponse:
    tiers = [types.CachedTokens(tier=types.KV_TIER_DEVICE, tokens=cached)] if cached else []
    return work.GenerateResponse(accepted=work.Accepted(cached=tiers, precision="fp32", model_digest=b"weights"))


def tokens(choice: int, position: int, ids: Sequence[int], logprobs: int | None = None) -> work.GenerateResponse:
    message = work.Tokens(choice=choice, position=position, ids=ids)
    if logprobs is not None:
        for token in ids:
            top = [types.TokenLogprob(token_id=token, logprob=-0.5)] * logprobs
            message.logprobs.append(types.TokenLogprob(token_id=token, logprob=-0.5, top=top))
    return work.GenerateResponse(tokens=message)


def finished(
    request: work.GenerateRequest, choice: int, count: int, reason: int = types.FINISH_REASON_STOP, message: str = ""
) -> work.GenerateResponse:
    usage = types.Usage(
        prompt_tokens=len(request.prompt_ids), completion_tokens=count, precision="fp32", recomputed_tokens=2,
        queue_ms=3, first_token_ms=40, steps=count, median_step_ms=7.6, max_step_ms=30.1,
    )  # fmt: skip
    return work.GenerateResponse(
        finished=work.Finished(choice=choice, reason=reason, completion_tokens=count, usage=usage, message=message)
    )


def says(
    *answers: Sequence[int],
    batch: int = 1,
    reason: int = types.FINISH_REASON_STOP,
    cached: int = 0,
    stop_token: int = 0,
) -> Script:
    """Emits answers[choice] after what is emitted already. `stop_token` 1 = a counted stop token ends each."""

    async def script(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        logprobs = request.sampling.top_logprobs if request.sampling.HasField("top_logprobs") else None
        yield accepted(cached)
        left = {choice.index: len(choice.emitted_ids) for choice in request.choices}
        while left:
            for choice, position in list(left.items()):
                answer = answers[choice][: request.sampling.max_tokens]
                keep = worker.stopped(request, choice)
                if keep is not None:
                    del left[choice]
                    yield finished(request, choice, keep)
                elif position < len(answer):
                    ids = answer[position : position + batch]
                    left[choice] += len(ids)
                    yield tokens(choice, position, ids, logprobs)
                else:
                    del left[choice]
                    cut = len(answers[choice]) > len(answer)
                    yield finished(
                        request, choice, len(answer) + stop_token, types.FINISH_REASON_LENGTH if cut else reason
                    )
            await asyncio.sleep(0)

    return script


def first(count: int, script: Script, then: Script) -> Script:
    """The first `count` responses of `script`, then all of `then`."""

    async def both(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async for response in script(worker, request, context):
            if count_left[0] == 0:
                break
            count_left[0] -= 1
            yield response
        async for response in then(worker, request, context):
            yield response

    count_left = [count]
    return both


async def hangs(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Says nothing more, for ever."""
    await asyncio.Event().wait()
    yield accepted()


async def progresses(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Works on for ever and has nothing to show."""
    while True:
        await asyncio.sleep(0.1)
        yield work.GenerateResponse(progress=work.Progress(engine_steps=1, median_step_ms=5))


async def resets(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Ends as a killed process does: UNAVAILABLE from the transport."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    yield accepted()


def raises(error: ShoalError) -> Script:
    """Refuses or fails as our own services do."""

    async def script(worker: "ScriptedWorker", request: work.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        async with errors_as_status(context):
            raise error
        yield accepted()

    return script
