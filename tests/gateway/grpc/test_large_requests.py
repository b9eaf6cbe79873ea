"""A request that is too large is told so by us, in the words of HTTP, up to a size that gRPC itself refuses."""

import grpc
import pytest

from mesh.errors import PayloadTooLarge, error_of
from shoal.channel import MAX_MESSAGE_BYTES
from shoal.gateway.v1 import gateway_pb2 as pb
from shoal.gateway.v1 import gateway_pb2_grpc

MODEL = "smollm2-135m"
MOST_BYTES = 6 << 20


@pytest.fixture
async def gateway(mesh, eventually):
    started = await mesh.start_gateway(max_body_bytes=MOST_BYTES)
    await eventually(lambda: not started.missing)
    return started


@pytest.fixture
async def stub(gateway):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield gateway_pb2_grpc.InferenceServiceStub(channel)


def requests(characters):
    generate = pb.GenerateRequest(model=MODEL, text="x" * characters)
    return {
        "Generate": generate,
        "Chat": pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="x" * characters)]),
        "CountTokens": pb.CountTokensRequest(generate=generate),
    }


async def refused(stub, call, request):
    made = getattr(stub, call)(request, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await (made if call == "CountTokens" else made.read())
    return failed.value


@pytest.mark.parametrize(("call", "field"), [("Generate", "prompt"), ("Chat", "messages"), ("CountTokens", "prompt")])
async def test_what_is_larger_than_grpcs_default_and_allowed_is_judged_by_what_is_in_it(stub, call, field):
    error = await refused(stub, call, requests(MAX_MESSAGE_BYTES + 1)[call])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error_of(error).field, error_of(error).code) == (field, "context_length_exceeded")


@pytest.mark.parametrize("call", ["Generate", "Chat", "CountTokens"])
async def test_a_request_over_the_limit_has_the_code_and_the_words_of_http(mesh, gateway, stub, call):
    error = await refused(stub, call, requests(MOST_BYTES)[call])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with mesh.http(gateway) as client:
        told = (await client.post("/v1/completions", content=b"x" * (MOST_BYTES + 1))).json()["error"]
    assert (error_of(error).message, error_of(error).code) == (told["message"], told["code"])


async def test_what_grpc_itself_refuses_is_too_large_all_the_same(stub):
    error = await refused(stub, "Generate", requests(MOST_BYTES + MAX_MESSAGE_BYTES)["Generate"])
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert type(error_of(error)) is PayloadTooLarge
