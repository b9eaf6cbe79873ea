"""Keys, priorities and buckets, as a caller meets them on both doors (faults B09, B10)."""

import asyncio

import grpc
import pytest

from gateway.tenants import hash_key
from mesh.errors import error_of
from shoal.gateway.v1 import gateway_pb2, gateway_pb2_grpc

KEY = "sk-of-acme"


@pytest.fixture
async def keyed(mesh, tmp_path, eventually):
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[[tenant]]\nname = "acme"\nkeys = ["{hash_key(KEY)}"]\ncapacity = 600\nrefill_per_s = 200\n'
        'max_priority = "normal"\n'
    )
    gateway = await mesh.start_gateway(tenants_file=str(path))
    await eventually(lambda: not gateway.missing)
    return gateway


@pytest.fixture
def post(mesh, keyed):
    async def posted(key=KEY, **body):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"model": "smollm2-135m", "prompt": [5, 6, 7], "max_tokens": 100, **body}
        async with mesh.http(keyed) as client:
            return await client.post("/v1/completions", json=body, headers=headers)

    return posted


@pytest.mark.parametrize("key", ["", "sk-wrong"])
async def test_without_a_known_key_it_is_a_401(mesh, keyed, post, key):
    reply = await post(key)
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    async with mesh.http(keyed) as client:
        assert (await client.get("/v1/models")).status_code == 401
    async with grpc.aio.insecure_channel(f"127.0.0.1:{keyed.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.InferenceServiceStub(channel).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_metrics_are_not_on_the_public_door_where_there_are_keys(mesh, keyed):
    async with mesh.http(keyed) as client:
        refused = await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    async with mesh.http() as client:
        assert "shoal_gateway_in_flight" in (await client.get("/metrics")).text


async def test_the_tenant_comes_from_the_key_and_salts_the_cache(mesh, play, ids_of, post):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    assert (await post()).status_code == 200
    [request] = mesh.worker.requests
    assert request.meta.tenant == "acme"
    assert len(request.cache_salt) == 32


async def test_a_priority_above_the_keys_is_a_403(post):
    reply = await post(priority="high")
    assert (reply.status_code, reply.json()["error"]["param"]) == (403, "priority")


async def test_an_empty_bucket_is_a_429_whose_hint_holds(mesh, play, ids_of, post, keyed, eventually):
    mesh.worker.scripts = [play.progresses]
    running = asyncio.create_task(post())
    await eventually(lambda: mesh.worker.running)
    refused = await post(max_tokens=120)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota")
    wait_s = int(refused.headers["retry-after"])
    assert wait_s >= 1
    async with grpc.aio.insecure_channel(f"127.0.0.1:{keyed.grpc_port}") as channel:
        request = gateway_pb2.GenerateRequest(model="smollm2-135m", tokens=gateway_pb2.TokenIds(ids=[5, 6, 7]))
        request.options.sampling.max_tokens = 120
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request, timeout=5, metadata=(("authorization", f"Bearer {KEY}"),)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 0 < error_of(caught.value).retry_after_s <= wait_s
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    await asyncio.sleep(wait_s)  # what the hint promises is about this very time
    assert (await post(max_tokens=120)).status_code == 200
    running.cancel()
    await asyncio.wait([running])


async def test_what_was_not_used_is_given_back(mesh, play, ids_of, post):
    mesh.worker.scripts = [play.says(ids_of("ok"))]
    for _ in range(10):
        assert (await post(max_tokens=140)).status_code == 200


async def test_a_request_that_no_bucket_holds_is_a_400(post):
    reply = await post(max_tokens=1000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "quota_capacity")
