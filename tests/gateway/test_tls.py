"""The gateway's two doors with TLS: no plain talk, and certificates asked for only where that is set."""

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.service import Gateway
from gateway.settings import GatewaySettings
from mesh.cli.authority import Authority, Validity
from mesh.client import connect
from mesh.settings import SettingsError
from mesh.tls import OPERATOR, Tls

VALID = Validity.days(1)
NOBODY = "127.0.0.1:1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = Authority(VALID)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    for identity, hosts in (("gateway", ("127.0.0.1",)), ("operator", ())):
        certificate, key = authority.issue(identity, VALID, hosts)
        (tmp_path / f"{identity}.pem").write_bytes(certificate)
        (tmp_path / f"{identity}.key").write_bytes(key)
    return tmp_path


Door = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def door(folder: Path, text_model: Any, logging_as_before: None, play: Any) -> Door:
    """`async with door(client_certs=…) as gateway`: one without a scheduler; its doors are what counts."""
    return lambda **given: play.serving(NOBODY, text_model, tls_dir=str(folder), **given)


@pytest.fixture
async def gateway(door: Door) -> AsyncIterator[Gateway]:
    async with door() as gateway:
        yield gateway


async def get(gateway: Gateway, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        return (await client.get(f"https://127.0.0.1:{gateway.http_port}/health")).status_code


async def live(channel: grpc.aio.Channel) -> int:
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service="live"), timeout=5)).status


def believing(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.pem")


async def test_whoever_believes_the_ca_is_answered_at_both_doors(gateway: Gateway, folder: Path) -> None:
    assert await get(gateway, believing(folder)) == 200
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    channel = grpc.aio.secure_channel(f"127.0.0.1:{gateway.grpc_port}", credentials)
    assert await live(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_plain_talk_is_refused_at_both_doors_and_the_next_one_is_served(gateway: Gateway, folder: Path) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"http://127.0.0.1:{gateway.http_port}/health")
    with pytest.raises(grpc.aio.AioRpcError):
        await live(grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}"))
    assert await get(gateway, believing(folder)) == 200


async def test_where_certificates_are_required_only_those_of_the_ca_come_in(door: Door, folder: Path) -> None:
    operator = Tls(folder, OPERATOR)
    async with door(client_certs="required") as gateway:
        assert await get(gateway, operator.http_client_context()) == 200
        address = f"127.0.0.1:{gateway.grpc_port}"
        assert await live(connect(address, operator)) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(httpx.TransportError):
            await get(gateway, believing(folder))
        with pytest.raises(grpc.aio.AioRpcError):
            await live(grpc.aio.secure_channel(address, grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())))


def test_asking_for_certificates_without_tls_is_a_setting_that_cannot_be_used() -> None:
    with pytest.raises(SettingsError, match="SHOAL_TLS_DIR"):
        GatewaySettings.load(client_certs="required")


async def test_certificates_that_cannot_be_used_are_named_with_their_variable(folder: Path, door: Door) -> None:
    (folder / "gateway.key").unlink()
    with pytest.raises(SettingsError, match=r"SHOAL_GATEWAY_TLS_DIR: .*gateway\.key: No such file"):
        async with door():
            pytest.fail("it started")
