"""`python -m gateway` as a process: what it says when it listens, and how it ends."""

import asyncio
import json
import os
import signal
import socket
import sys

import httpx
import pytest


async def start(**variables):
    names = {f"SHOAL_{name.upper()}": value for name, value in variables.items()}
    free = {"SHOAL_GATEWAY_HTTP_PORT": "0", "SHOAL_GATEWAY_GRPC_PORT": "0", "SHOAL_SCHEDULERS": "127.0.0.1:1"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway"), env={**os.environ, **free, **names}, stderr=asyncio.subprocess.PIPE
    )


async def listening(process):
    async for line in process.stderr:
        entry = json.loads(line)
        if entry.get("event") == "listening":
            return entry
    pytest.fail("it ended before it listened")


async def test_it_names_its_ports_is_alive_and_exits_with_0_on_sigterm():
    process = await start()
    try:
        async with asyncio.timeout(60):
            ports = await listening(process)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['http_port']}", trust_env=False) as client:
                assert (await client.get("/health")).status_code == 200
                unready = await client.get("/ready")
                assert unready.json() == {"ready": False, "missing": ["no scheduler is connected"]}
            assert ports["grpc_port"] > 0
            async with httpx.AsyncClient(trust_env=False) as client:
                metrics = await client.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics")
            assert "shoal_gateway_in_flight" in metrics.text
            process.send_signal(signal.SIGTERM)
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"gateway_host": "0.0.0.0"}, "SHOAL_GATEWAY_TENANTS_FILE"),
        ({"gateway_max_choices": "many"}, "SHOAL_GATEWAY_MAX_CHOICES"),
        ({"model": "never-pulled"}, "shoal pull never-pulled"),
        ({"model": "never-pulled"}, "SHOAL_MODEL"),
        ({"gateway_tenants_file": "no-such.toml"}, "no-such.toml"),
        ({"schedulers": "foo"}, "SHOAL_SCHEDULERS"),
        ({"gateway_redis_url": "localhost:6379"}, "SHOAL_GATEWAY_REDIS_URL"),
    ],
)
async def test_settings_that_cannot_be_used_are_named_and_end_it_with_2(variables, said):
    process = await start(**variables)
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert (process.returncode, said in stderr.decode().splitlines()[-1]) == (2, True), stderr.decode()
    assert b"Traceback" not in stderr


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "metrics_port"])
async def test_a_port_that_is_taken_is_named_and_ends_it_with_2(name):
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = await start(**{f"gateway_{name}": str(other.getsockname()[1])})
        async with asyncio.timeout(60):
            _, stderr = await process.communicate()
    (line,) = stderr.decode().splitlines()
    assert process.returncode == 2
    assert f"SHOAL_GATEWAY_{name.upper()}: cannot listen" in line
