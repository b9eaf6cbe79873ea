"""The asynchronous client and its synchronous twin, each against a real gRPC server."""

import asyncio
from typing import Any

import grpc
import pytest

import mesh.errors
import shoal
from shoal.channel import MAX_MESSAGE_BYTES
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.types.v1 import types_pb2

STARTED = pb.GenerateResponse(started=pb.Started(request_id="r1", model="tiny", created_unix_s=5))
COMPLETED = pb.GenerateResponse(
    completed=pb.Completed(
        usage=types_pb2.Usage(
            prompt_tokens=9,
            completion_tokens=4,
            cached=[types_pb2.CachedTokens(tier=types_pb2.KV_TIER_DEVICE, tokens=3), types_pb2.CachedTokens(tokens=2)],
            precision="int8",
            queue_ms=1,
            first_token_ms=40,
            steps=4,
            median_step_ms=7.6,
            max_step_ms=30.1,
        ),
        queue_ms=12,
        attempts=2,
        worker="w0",
    )
)


def delta(text: str, choice: int = 0, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, choice=choice, **fields))


def finished(reason: "types_pb2.FinishReason.ValueType", choice: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.ChoiceFinished(reason=reason, choice=choice))


PARIS = [STARTED, delta("Pa"), delta("ris"), finished(types_pb2.FINISH_REASON_STOP), COMPLETED]


class Asker:
    """Both clients behind one face, so that each behaviour is asked of both."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def call(self, address: str, method: str, *given: Any, client: dict[str, Any] | None = None, **options: Any):
        """Result of a method, or (stream, pieces) where it streams."""
        if self.kind == "sync":
            return await asyncio.to_thread(self._call_sync, address, method, given, client or {}, options)
        async with shoal.Client(address, **client or {}) as connection:
            result = getattr(connection, method)(*given, **options)
            if isinstance(result, shoal.Stream):
                return result, [piece async for piece in result]
            return await result

    def _call_sync(self, address: str, method: str, given: Any, client: Any, options: Any):
        with shoal.SyncClient(address, **client) as connection:
            result = getattr(connection, method)(*given, **options)
            return (result, list(result)) if isinstance(result, shoal.SyncStream) else result


@pytest.fixture(params=["async", "sync"])
def asker(request: pytest.FixtureRequest) -> Asker:
    return Asker(request.param)


async def test_chat_yields_pieces_and_then_knows_the_usage(gateway, asker):
    gateway.script = PARIS
    stream, pieces = await asker.call(gateway.address, "chat", "Capital of France?", model="tiny")
    assert pieces == [shoal.Piece("Pa"), shoal.Piece("ris"), shoal.Piece(finish="stop")]
    assert stream.started == shoal.Started("r1", "", "tiny", 5, False)
    usage = shoal.Usage(
        9, 4, cached_tokens=5, cached_by_tier={"device": 3, "unspecified": 2}, precision="int8",
        queue_ms=1, first_token_ms=40, steps=4, median_step_ms=7.6, max_step_ms=30.1,
    )  # fmt: skip
    assert stream.summary == shoal.Summary(usage, queue_ms=12, attempts=2, worker="w0")
    assert hash(stream.summary) == hash(stream.summary)
    assert stream.summary.usage.total_tokens == 13


async def test_complete_chat_joins_interleaved_choices(gateway, asker):
    gateway.script = [
        STARTED,
        delta("one ", 1, token_ids=[4]),
        delta("zero", 0, reasoning="hm"),
        delta("more", 1, token_ids=[5, 6]),
        finished(types_pb2.FINISH_REASON_LENGTH, 1),
        finished(types_pb2.FINISH_REASON_STOP, 0),
        COMPLETED,
    ]
    answer = await asker.call(gateway.address, "complete_chat", "hi", model="tiny", n=2)
    assert answer.choices == (
        shoal.Choice(0, "zero", "stop", reasoning="hm"),
        shoal.Choice(1, "one more", "length", token_ids=(4, 5, 6)),
    )
    assert answer.text == "zero"
    assert answer.usage.prompt_tokens == 9


async def test_pieces_of_a_tool_call_are_joined_by_index(gateway, asker):
    call = [pb.ToolCallDelta(index=0, id="c1", name="weather", arguments='{"city":')]
    rest = [pb.ToolCallDelta(index=0, arguments=' "Oslo"}'), pb.ToolCallDelta(index=1, id="c2", name="time")]
    gateway.script = [
        STARTED,
        delta("", tool_calls=call),
        delta("", tool_calls=rest),
        finished(types_pb2.FINISH_REASON_TOOL_CALLS),
        COMPLETED,
    ]
    answer = await asker.call(gateway.address, "complete_chat", "weather?", model="tiny", tools=[shoal.Tool("weather")])
    assert answer.choices[0].finish == "tool_calls"
    assert answer.choices[0].tool_calls == (
        shoal.ToolCall(0, "c1", "weather", '{"city": "Oslo"}'),
        shoal.ToolCall(1, "c2", "time", ""),
    )
    assert gateway.requests[0].tools[0].parameters == '{"type": "object"}'


async def test_what_is_said_arrives_and_what_is_not_said_stays_absent(gateway, asker):
    gateway.script = PARIS
    turns = [{"role": "system", "content": "be brief"}, shoal.Message("user", "hi")]
    options = {"temperature": 0, "seed": 2**64 - 1, "max_tokens": 5, "stop": "\n", "n": 1, "priority": "batch"}
    await asker.call(gateway.address, "chat", turns, model="tiny", logit_bias={3: -1.5}, session_id="s", **options)
    request = gateway.requests[0]
    assert [(m.role, m.content) for m in request.messages] == [("system", "be brief"), ("user", "hi")]
    sampling = request.options.sampling
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0, 2**64 - 1, 5)
    assert dict(sampling.logit_bias) == {3: -1.5}
    assert list(request.options.stop) == ["\n"]
    assert request.options.priority == types_pb2.PRIORITY_BATCH
    assert request.options.session_id == "s"
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("min_tokens")


@pytest.mark.parametrize(("prompt", "kind"), [("Once", "text"), ([5, 6, 7], "tokens")])
async def test_generate_takes_text_or_token_ids(gateway, asker, prompt, kind):
    gateway.script = PARIS
    answer = await asker.call(gateway.address, "complete", prompt, model="tiny")
    assert answer.text == "Paris"
    assert gateway.requests[0].WhichOneof("prompt") == kind
    assert (gateway.requests[0].text or list(gateway.requests[0].tokens.ids)) == prompt


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"temprature": 1}, TypeError, "no such option: temprature"),
        ({"regex": "a", "json_schema": "{}"}, ValueError, "one of json_schema, regex"),
        ({"priority": "urgent"}, ValueError, "high, normal, batch"),
        ({"n": -1}, ValueError, "-1"),
    ],
)
async def test_an_option_that_cannot_be_is_refused_before_anything_is_sent(gateway, asker, options, error, words):
    with pytest.raises(error, match=words):
        await asker.call(gateway.address, "chat", "hi", model="tiny", **options)
    assert gateway.requests == []


async def test_a_turn_without_a_role_or_with_an_unknown_key_is_refused(gateway, asker):
    for turn in ({"content": "hi"}, {"role": "user", "text": "hi"}):
        with pytest.raises(TypeError, match="a turn has role"):
            await asker.call(gateway.address, "chat", [turn], model="tiny")


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (mesh.errors.InvalidRequest("bad role", field="messages[0].role"), shoal.InvalidRequest),
        (mesh.errors.PayloadTooLarge("too long", field="messages"), shoal.InvalidRequest),
        (mesh.errors.Unauthenticated("no key"), shoal.NotAllowed),
        (mesh.errors.PermissionDenied("not yours"), shoal.NotAllowed),
        (mesh.errors.Overloaded("queue is full", code="queue_full", retry_after_s=2.5), shoal.Overloaded),
        (mesh.errors.QuotaExceeded("bucket is empty", retry_after_s=60), shoal.Overloaded),
        (mesh.errors.WorkerLost("the worker broke"), shoal.Unavailable),
        (mesh.errors.DeadlineExceeded("too late"), shoal.TimedOut),
        (mesh.errors.Internal("our fault"), shoal.ShoalClientError),
    ],
)
async def test_an_error_of_the_mesh_arrives_with_its_field_code_and_delay(gateway, asker, sent, received):
    gateway.script = [sent]
    with pytest.raises(shoal.ShoalClientError) as caught:
        await asker.call(gateway.address, "chat", "hi", model="tiny")
    error = caught.value
    assert type(error) is received
    assert (error.message, error.field, error.code) == (sent.message, sent.field, sent.code)
    assert error.retry_after_s == sent.retry_after_s
    assert error.status is mesh.errors.kind_of(sent).status


async def test_an_error_in_mid_stream_comes_after_the_pieces_before_it(gateway):
    gateway.script = [STARTED, delta("Pa"), mesh.errors.WorkerLost("the worker broke")]
    seen = []
    async with shoal.Client(gateway.address, model="tiny") as client:
        pieces = aiter(client.chat("hi"))
        seen.append(await anext(pieces))
        with pytest.raises(shoal.Unavailable, match="the worker broke"):
            await anext(pieces)
    assert seen == [shoal.Piece("Pa")]


async def test_a_stream_without_its_last_message_is_not_taken_for_a_whole_answer(gateway, asker):
    gateway.script = PARIS[:-1]
    with pytest.raises(shoal.ShoalClientError, match="before its last message"):
        await asker.call(gateway.address, "complete_chat", "hi", model="tiny")


async def test_a_message_over_the_size_limit_is_the_callers_to_change(gateway, asker):
    with pytest.raises(shoal.InvalidRequest, match="larger than max"):
        await asker.call(gateway.address, "complete_chat", "x" * (MAX_MESSAGE_BYTES + 1), model="tiny")


async def test_leaving_the_loop_early_cancels_the_call_at_the_gateway(gateway):
    gateway.script = [STARTED, delta("Pa")]
    gateway.hang = True
    async with shoal.Client(gateway.address, model="tiny") as client:
        async for piece in client.chat("hi"):
            assert piece.text == "Pa"
            break
        assert await asyncio.to_thread(gateway.ended.wait, 5)


def test_leaving_the_loop_early_cancels_the_call_at_the_gateway_synchronously(gateway):
    gateway.script = [STARTED, delta("Pa")]
    gateway.hang = True
    with shoal.SyncClient(gateway.address, model="tiny") as client:
        for piece in client.chat("hi"):
            assert piece.text == "Pa"
            break
        assert gateway.ended.wait(5)


async def test_cancelling_the_task_that_reads_cancels_the_call_at_the_gateway(gateway):
    gateway.script = [STARTED, delta("Pa")]
    gateway.hang = True
    got_one = asyncio.Event()

    async def read(client: shoal.Client) -> None:
        async for _ in client.chat("hi"):
            got_one.set()

    async with shoal.Client(gateway.address, model="tiny") as client:
        task = asyncio.ensure_future(read(client))
        await got_one.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gateway.ended.wait, 5)


async def test_the_api_key_travels_as_a_bearer_token(gateway, asker):
    gateway.script = PARIS
    await asker.call(gateway.address, "chat", "hi", model="tiny", client={"api_key": "sk-1"})
    assert gateway.metadata[0]["authorization"] == "Bearer sk-1"


async def test_the_one_served_model_is_used_where_none_is_named(gateway):
    gateway.script = PARIS
    async with shoal.Client(gateway.address) as client:
        await client.complete_chat("hi")
        await client.complete_chat("hi")
    kinds = [type(request).__name__ for request in gateway.requests]
    assert kinds == ["ListModelsRequest", "ChatRequest", "ChatRequest"]
    assert gateway.requests[1].model == "tiny"


async def test_a_model_must_be_named_where_several_or_none_are_served(gateway, asker):
    gateway.models = [pb.Model(name="a"), pb.Model(name="b")]
    with pytest.raises(shoal.ShoalClientError, match="say which model: a, b"):
        await asker.call(gateway.address, "chat", "hi")
    gateway.models = []
    with pytest.raises(shoal.ShoalClientError, match="no worker serves"):
        await asker.call(gateway.address, "chat", "hi")


async def test_models_and_token_counts_are_looked_up(gateway, asker):
    assert await asker.call(gateway.address, "models") == (shoal.Model("tiny", 64, 2, False),)
    assert await asker.call(gateway.address, "count_tokens", "hi", model="tiny") == shoal.TokenCount(7, 64)
    assert gateway.requests[-1].chat.messages[0].content == "hi"


async def test_a_gateway_that_is_not_there_is_unavailable(asker):
    with pytest.raises(shoal.Unavailable) as caught:
        await asker.call("127.0.0.1:1", "chat", "hi", model="tiny")
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    assert caught.value.code is None


async def test_an_answer_that_takes_longer_than_its_timeout_is_given_up(gateway, asker):
    gateway.script = [STARTED]
    gateway.hang = True
    with pytest.raises(shoal.TimedOut):
        await asker.call(gateway.address, "chat", "hi", model="tiny", timeout_s=0.2)
