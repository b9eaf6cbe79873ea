"""What asks for a structured answer reaches the worker, and its refusal the caller, by the caller's own name for it."""

import json

import grpc
import pytest

from mesh.errors import InvalidRequest, error_of
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from shoal.types.v1 import types_pb2

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MODEL = "smollm2-135m"
BODIES = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": MODEL, "prompt": "hi"},
}

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
# What a worker is asked for.
ASKED = [
    (CHAT, {"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"}), "response_format"),
    (CHAT, {"response_format": NAMED}, ("json_schema", SCHEMA), "response_format.json_schema.schema"),
    (TEXT, {"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA), "structured_outputs.json"),
    (TEXT, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json_schema", SCHEMA), "structured_outputs.json"),
    (TEXT, {"structured_outputs": {"json_object": True}}, ("json_schema", {"type": "object"}),
     "structured_outputs.json_object"),
    (CHAT, {"structured_outputs": {"regex": "a+"}}, ("regex", "a+"), "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"grammar": "root ::= b"}}, ("grammar", "root ::= b"), "structured_outputs.grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes", "wanted", "name"), ASKED)
async def test_a_structure_reaches_the_worker_whose_refusal_is_a_400_by_the_callers_name(
    mesh, play, path, changes, wanted, name
):
    structure, content = wanted
    mesh.worker.scripts = [play.raises(InvalidRequest(f"{structure} cannot be used: because", field=structure))]
    async with mesh.http() as client:
        reply = await client.post(path, json={**BODIES[path], **changes})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, name, "invalid_request_error")
    assert name in error["message"]
    assert error["message"].endswith("because")
    [asked] = mesh.worker.requests
    assert asked.sampling.WhichOneof("structure") == structure
    sent = getattr(asked.sampling, structure)
    assert (json.loads(sent) if structure == "json_schema" else sent) == content


async def test_grpc_says_the_same_of_a_structure(mesh, play):
    mesh.worker.scripts = [play.raises(InvalidRequest("regex cannot be used: because", field="regex"))]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc_port}") as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        for structure, text in (("json_schema", "{"), ("regex", ""), ("grammar", "x" * 70_000), ("regex", "a+")):
            options = gateway_pb2.Options(sampling=types_pb2.SamplingParams(**{structure: text}))
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in stub.Generate(gateway_pb2.GenerateRequest(model=MODEL, text="hi", options=options)):
                    pass
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_of(failed.value).field == structure
