"""The containers' health check asks grpc.health.v1 and answers by its exit code."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from mesh.server import Server


async def probe(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of `python -m mesh.probe`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mesh.probe", *arguments, stderr=subprocess.PIPE
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
    code, told = await probe("127.0.0.1:1", "--timeout", "1")
    assert code == 1
    assert told.startswith("127.0.0.1:1: ")
    assert told.count("\n") == 1


def test_it_starts_without_what_services_need() -> None:
    """It runs every few seconds in each container: 300 ms of CPU at most (here: 170), and no heavy imports."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys, mesh.probe; print(*{'pydantic', 'uvloop', 'opentelemetry'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.stdout.strip() == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3
