"""The containers' health check asks grpc.health.v1 and answers by its exit code."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from mesh.callers import OnlyFrom
from mesh.cli.authority import Authority, Validity
from mesh.server import Server
from mesh.tls import GATEWAY, WORKER, Tls


async def probe(*arguments: str, tls_dir: Path | str = "") -> tuple[int, str]:
    """Exit code and stderr of `python -m mesh.probe`."""
    environment = os.environ | {"SHOAL_TLS_DIR": str(tls_dir)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mesh.probe", *arguments, stderr=subprocess.PIPE, env=environment
    )
    _, told = await process.communicate()
    return process.returncode or 0, told.decode()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    server = Server({})
    port = await server.start("127.0.0.1", 0)
    yield server, f"127.0.0.1:{port}"
    await server.drain(0)


async def test_it_ends_with_0_when_the_server_is_serving_and_says_nothing(server: tuple[Server, str]) -> None:
    await server[0].set_serving(True)
    assert await probe(server[1]) == (0, "")


async def test_it_ends_with_1_and_one_line_when_the_server_is_not_serving(server: tuple[Server, str]) -> None:
    assert await probe(server[1]) == (1, f"{server[1]}: NOT_SERVING\n")


async def test_a_server_that_is_not_ready_is_live(server: tuple[Server, str]) -> None:
    assert await probe(server[1], "--live") == (0, "")


async def test_a_service_that_is_not_there_is_a_failure_that_names_the_status(server: tuple[Server, str]) -> None:
    code, told = await probe(server[1], "--service", "shoal.nobody.v1.Nobody")
    assert code == 1
    assert "NOT_FOUND" in told
    assert told.count("\n") == 1


async def test_nobody_there_is_a_failure_within_its_time() -> None:
    code, told = await probe("127.0.0.1:1", "--timeout-s", "1")
    assert code == 1
    assert told.startswith("127.0.0.1:1: ")
    assert told.count("\n") == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a container of a worker holds: the CA, its own certificate and key."""
    authority, valid = Authority(Validity.days(1)), Validity.days(1)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    certificate, key = authority.issue(WORKER, valid)
    (tmp_path / "worker.pem").write_bytes(certificate)
    (tmp_path / "worker.key").write_bytes(key)
    return tmp_path


async def test_with_tls_it_asks_as_the_identity_that_the_folder_holds(folder: Path) -> None:
    server = Server({}, [OnlyFrom((GATEWAY,), CollectorRegistry())])
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0, Tls(folder, WORKER))}"
    assert await probe(address, "--live", tls_dir=folder) == (0, "")
    assert await probe(address, tls_dir=folder) == (1, f"{address}: NOT_SERVING\n")
    code, told = await probe(address, "--live")
    assert code == 1
    assert "UNAVAILABLE" in told
    (folder / "worker.key").unlink()
    code, told = await probe(address, "--live", tls_dir=folder)
    assert (code, told.count("\n")) == (1, 1)
    assert f"{folder}: holds no key" in told
    await server.drain(0)


async def test_with_tls_a_server_of_another_ca_is_a_failure(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = Server({})
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0, Tls(folder, WORKER))}"
    (folder / "ca.pem").write_bytes(Authority(Validity.days(1)).pem)
    code, told = await probe(address, "--live", tls_dir=folder)
    assert (code, told.count("\n")) == (1, 1)
    assert "worker.pem: is not signed by ca.pem" in told
    await server.drain(0)


def test_it_starts_without_what_services_need() -> None:
    """It runs every few seconds in each container: 300 ms of CPU at most (here: 170), and no heavy imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys, mesh.probe; print(*{'pydantic', 'uvloop', 'opentelemetry'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.stdout.strip() == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


async def test_an_address_without_a_port_is_told_in_words() -> None:
    code, told = await probe("localhost")
    assert code == 2
    assert told.endswith("localhost: is not HOST:PORT\n")
