"""Bad input is a 400 that names the field, in OpenAI's shape; the gRPC twin says the same words."""

import asyncio
import functools
import json
import threading
import time

import grpc
import pytest

from mesh.errors import error_of
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from shoal.types.v1 import types_pb2

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MODEL = "smollm2-135m"
HI = [{"role": "user", "content": "hi"}]

DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(900), {})


def schema_of(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# path, what is changed in a good body, the field that must be named
FIELDS = [
    (CHAT, {"model": 5}, "model"),
    (CHAT, {"model": "gpt-4"}, "model"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[1].tool_call_id"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 0, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": "many"}, "max_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": 2.1}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"top_k": -1}, "top_k"),
    (CHAT, {"top_k": 10**400}, "top_k"),
    (CHAT, {"logprobs": True, "top_logprobs": 10**400}, "top_logprobs"),
    (CHAT, {"min_p": 2}, "min_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"seed": -1}, "seed"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["x" * 257]}, "stop"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"stop": [1]}, "stop[0]"),
    (CHAT, {"logit_bias": {"191222": -100}}, "logit_bias"),
    (CHAT, {"logit_bias": {"AI": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [49152]}, "stop_token_ids"),
    (CHAT, {"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 1e-38}, "repetition_penalty"),
    (CHAT, {"priority": "urgent"}, "priority"),
    (CHAT, {"priority": ""}, "priority"),
    (TEXT, {"priority": ""}, "priority"),
    (CHAT, {"session_id": "s" * 129}, "session_id"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    (CHAT, {"response_format": schema_of([1])}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": schema_of("{")}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": schema_of({"type": "string", "const": 5})}, "response_format.json_schema.schema"),
    (TEXT, {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x"}}}, "structured_outputs.json"),
    (CHAT, {"response_format": schema_of({"items": DEEP})}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": schema_of({"const": "x" * 70_000})}, "response_format.json_schema.schema"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    (TEXT, {"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
    (TEXT, {"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
    (TEXT, {"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    (TEXT, {"structured_outputs": {"json": "no JSON"}}, "structured_outputs.json"),
    (TEXT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (CHAT, {"wings": 2}, "wings"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [49152]}, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    (TEXT, {"prompt": [1, "b"]}, "prompt"),
    (TEXT, {"prompt": "x" * 700_000}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 700_000}]}, "messages"),
    (CHAT, {"tools": [{"function": {"name": "f", "parameters": DEEP}}]}, "tools[0].function.parameters"),
    (TEXT, {"prompt": [1.5]}, "prompt[0]"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"logprobs": 6}, "logprobs"),
]


def body_of(path, changes):
    return {"model": MODEL, **({"messages": HI} if path == CHAT else {"prompt": "hi"}), **changes}


async def test_every_bad_field_is_a_400_that_names_it_and_the_next_call_works(mesh, play, ids_of):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    async with mesh.http() as client:
        for path, changes, field in FIELDS:
            reply = await client.post(path, json=body_of(path, changes))
            assert reply.status_code == 400, (changes, reply.text)
            error = reply.json()["error"]
            assert error["param"] == field, (changes, error)
            assert error["type"] == "invalid_request_error"
            assert field.partition("[")[0] in error["message"], error
        assert mesh.scheduler.events == []
        assert (await client.post(CHAT, json=body_of(CHAT, {}))).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"[" * 50_000, b'{"model": "a"} x', b'{"model":"\xff"}', b'{"temperature": NaN}'],
    ids=repr,
)
async def test_what_is_no_json_object_is_a_400(mesh, raw):
    async with mesh.http() as client:
        reply = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"temperature": NaN}', "which has no NaN: JSON is malformed: invalid character (byte 16)"),
        (b'{"top_p": -Infinity}', "which has no Infinity"),
        (b'{"temperature": Nope}', "the body is not JSON: JSON is malformed"),
        (b'{"user": "NaN", "temperature": x}', "the body is not JSON: JSON is malformed"),
    ],
    ids=repr,
)
async def test_what_is_no_json_is_told_what_it_is(mesh, raw, said):
    async with mesh.http() as client:
        error = (await client.post(CHAT, content=raw)).json()["error"]
    assert said in error["message"]
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": -1}, "top_k must be from 0 to 2147483648, not -1"),
        ({"temperature": 3}, "temperature must be from 0 to 2, not 3"),
        ({"top_p": 1e-320}, "top_p must be above 0 (at least 1e-45) and at most 1, not 1e-320"),
        ({"seed": -1}, "seed must be from 0 to 2^64-1, not -1"),
        ({"min_tokens": -3}, "min_tokens must be from 0 to max_tokens, not -3"),
    ],
    ids=str,
)
async def test_a_value_out_of_range_is_told_with_the_range_and_as_it_was_given(mesh, changes, said):
    async with mesh.http() as client:
        error = (await client.post(CHAT, json=body_of(CHAT, changes))).json()["error"]
    assert error["message"].startswith(said)
    assert mesh.scheduler.events == []


async def test_a_token_id_outside_the_vocabulary_is_told_with_its_position(mesh):
    async with mesh.http() as client:
        error = (await client.post(TEXT, json=body_of(TEXT, {"prompt": [5, 6, 49152, 7]}))).json()["error"]
    assert error["message"] == "prompt[2]: token id 49152 is outside the vocabulary of 49152"


async def test_unknown_models_have_openais_code(mesh, ask):
    assert (await ask(model="gpt-4")).json()["error"]["code"] == "model_not_found"


async def test_a_missing_field_is_named(mesh):
    async with mesh.http() as client:
        assert (await client.post(CHAT, json={"messages": HI})).json()["error"]["param"] == "model"
        assert (await client.post(TEXT, json={"model": MODEL})).json()["error"]["param"] == "prompt"


async def test_a_body_over_the_limit_is_a_413_before_it_is_read(mesh):
    small = await mesh.start_gateway(max_body_bytes=2048)
    async with mesh.http(small) as client:
        announced = await client.post(CHAT, json=body_of(CHAT, {"user": "x" * 4096}))
        assert (announced.status_code, announced.json()["error"]["code"]) == (413, "too_large")

        async def endless():
            for _ in range(100):
                yield b"x" * 1024

        unannounced = await client.post(CHAT, content=endless())
        assert unannounced.status_code == 413


async def test_wrong_method_path_and_media_type_have_openais_shape(mesh):
    async with mesh.http() as client:
        for reply, status in [
            (await client.get(CHAT), 405),
            (await client.post("/v1/images", json={}), 404),
            (await client.post(f"{CHAT}/", json=body_of(CHAT, {})), 404),
            (await client.post(CHAT, content=b"a=b", headers={"content-type": "text/plain"}), 415),
        ]:
            assert reply.status_code == status
            assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
async def test_a_compressed_body_is_a_415_that_says_so(mesh, encoding):
    async with mesh.http() as client:
        reply = await client.post(CHAT, json=body_of(CHAT, {}), headers={"content-encoding": encoding})
        plain = await client.post(CHAT, json=body_of(CHAT, {"n": 0}), headers={"content-encoding": "identity"})
    assert (reply.status_code, "Content-Encoding" in reply.json()["error"]["message"]) == (415, True)
    assert plain.json()["error"]["param"] == "n"


@pytest.mark.parametrize("charset", ["utf-16", '"UTF-16LE"', "latin1"])
async def test_a_body_in_another_charset_than_utf_8_is_a_415_that_says_so(mesh, charset):
    async with mesh.http() as client:
        content_type = {"content-type": f"application/json; charset={charset}"}
        reply = await client.post(CHAT, json=body_of(CHAT, {}), headers=content_type)
        same = {"content-type": 'application/json; v=1; Charset="UTF-8"'}
        plain = await client.post(CHAT, json=body_of(CHAT, {"n": 0}), headers=same)
    assert (reply.status_code, "UTF-8" in reply.json()["error"]["message"]) == (415, True)
    assert plain.json()["error"]["param"] == "n"


async def test_a_body_nested_too_deeply_is_a_400_that_says_so(mesh):
    raw = f'{{"model": "{MODEL}", "messages": [], "metadata": {"[" * 3000}{"]" * 3000}}}'
    async with mesh.http() as client:
        reply = await client.post(CHAT, content=raw.encode())
    assert (reply.status_code, "nested too deeply" in reply.json()["error"]["message"]) == (400, True)


async def test_the_edges_of_max_tokens_and_context_have_one_answer_each(mesh, play, eventually):
    mesh.scheduler.context_tokens = 64
    mesh.scheduler.changed()
    await eventually(lambda: mesh.gateway.core.catalogue.context_tokens(MODEL) == 64)
    mesh.worker.scripts = [play.says(list(range(20, 220)))]

    async def ask(prompt_tokens, **given):
        async with mesh.http() as client:
            return await client.post(TEXT, json={"model": MODEL, "prompt": [5] * prompt_tokens, **given})

    def answered(reply):
        return reply.json()["usage"]["completion_tokens"], reply.json()["choices"][0]["finish_reason"]

    assert answered(await ask(4, max_tokens=1)) == (1, "length")
    assert answered(await ask(4, max_tokens=None)) == (16, "length")
    assert answered(await ask(4)) == (16, "length")
    assert answered(await ask(60, max_tokens=100)) == (4, "length")
    assert answered(await ask(63)) == (1, "length")
    for prompt_tokens in (64, 65):
        refused = await ask(prompt_tokens)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "this model's workers, as they are set up, take at most 63" in refused.json()["error"]["message"]
    async with mesh.http() as client:
        chat = (await client.post(CHAT, json=body_of(CHAT, {"max_tokens": None}))).json()
    assert chat["usage"]["total_tokens"] == 64
    assert answered(await ask(4)) == (16, "length")


async def test_a_clients_request_id_that_is_too_long_is_refused_by_its_headers_name(mesh):
    async with mesh.http() as client:
        reply = await client.post(CHAT, json=body_of(CHAT, {}), headers={"x-request-id": "x" * 129})
    assert reply.json()["error"]["param"] == "x-request-id"


async def test_millions_of_token_ids_are_refused_by_their_number(mesh):
    raw = f'{{"model": "{MODEL}", "prompt": [{"1," * 3_000_000}1]}}'.encode()
    last, longest, refused = time.monotonic(), 0.0, False
    async with mesh.http() as client, asyncio.TaskGroup() as group:
        call = group.create_task(client.post(TEXT, content=raw))
        while not call.done():
            await asyncio.sleep(0.001)
            now = time.monotonic()
            last, longest = now, max(longest, now - last)
    refused = call.result().json()["error"]
    assert (refused["code"], "3000001 tokens" in refused["message"]) == ("context_length_exceeded", True)
    began = time.monotonic()
    json.loads(raw)
    # As long as reading them takes at least, and not several times that.
    assert longest < 4 * (time.monotonic() - began)


async def test_tokenizing_ends_with_the_requests_time(mesh, monkeypatch, eventually):
    hasty = await mesh.start_gateway(request_timeout_s=0.2)
    await eventually(lambda: not hasty.missing)
    go_on = threading.Event()
    monkeypatch.setattr(type(mesh.text_model), "_encode", lambda self, marked: [5] if go_on.wait(20) else [])
    try:
        async with mesh.http(hasty) as client:
            long = [{"role": "user", "content": "too long to be tokenized on the event loop. " * 50}]
            reply = await client.post(CHAT, json=body_of(CHAT, {"messages": long}))
    finally:
        go_on.set()
    assert (reply.status_code, "tokenized" in reply.json()["error"]["message"]) == (504, True)


TWINS = [
    ({"sampling": {"temperature": -1.0}}, {"temperature": -1.0}),
    ({"sampling": {"top_p": 0.0}}, {"top_p": 0.0}),
    ({"sampling": {"max_tokens": 0}}, {"max_tokens": 0}),
    ({"sampling": {"logit_bias": {191222: -100.0}}}, {"logit_bias": {"191222": -100}}),
    ({"sampling": {"stop_token_ids": [49152]}}, {"stop_token_ids": [49152]}),
    ({"n": 0}, {"n": 0}),
    ({"n": 17}, {"n": 17}),
    ({"stop": [""]}, {"stop": [""]}),
    ({"session_id": "s" * 129}, {"session_id": "s" * 129}),
]


async def test_grpc_says_the_same_words_and_names_the_same_field(mesh):
    async with mesh.http() as client, grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc_port}") as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        for options, fields in TWINS:
            sampling = types_pb2.SamplingParams(**options.pop("sampling", {}))
            request = gateway_pb2.ChatRequest(
                model=MODEL,
                messages=[gateway_pb2.ChatMessage(role="user", content="hi")],
                options=gateway_pb2.Options(sampling=sampling, **options),
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Chat(request, timeout=10).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            said = error_of(caught.value)
            told = (await client.post(CHAT, json=body_of(CHAT, fields))).json()["error"]
            assert (said.field, said.message, said.code) == (told["param"], told["message"], told["code"])


NAN = float("nan")
# What JSON cannot say, and what only ids can.
B25_SAMPLING = [
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"min_p": NAN}, "min_p"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"logit_bias": {191_222: -100}}, "logit_bias"),
    ({"logit_bias": {5: NAN}}, "logit_bias"),
    ({"stop_token_ids": [49_152]}, "stop_token_ids"),
    ({"top_logprobs": 1_000_000}, "top_logprobs"),
]
B25_PROMPTS = [[], [(1 << 32) - 1], [1] * 50_000]


async def test_one_bad_request_over_grpc_is_refused_before_scheduling_while_its_neighbour_goes_on(mesh, play, ids_of):
    """B25."""
    mesh.worker.scripts = [play.first(2, play.says(ids_of("one two three")), play.progresses)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc_port}") as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        neighbour = stub.Generate(gateway_pb2.GenerateRequest(model=MODEL, text="hi"))
        assert (await neighbour.read()).HasField("started")
        bad = [({"text": "hi", "options": {"sampling": fields}}, field) for fields, field in B25_SAMPLING]
        bad += [({"tokens": {"ids": ids}}, "prompt") for ids in B25_PROMPTS]
        for fields, field in bad:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Generate(gateway_pb2.GenerateRequest(model=MODEL, **fields), timeout=10).read()
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            assert error_of(failed.value).field == field, fields
        assert len(mesh.worker.requests) == len(mesh.scheduler.of_kind("open")) == 1
        assert not neighbour.done()
        neighbour.cancel()


async def test_a_temperature_next_to_nothing_is_taken(mesh, play, ids_of):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    async with mesh.http() as client:
        assert (await client.post(CHAT, json=body_of(CHAT, {"temperature": 1e-9}))).status_code == 200
