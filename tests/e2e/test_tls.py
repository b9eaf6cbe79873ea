"""A whole mesh with TLS everywhere: it works as without, and a stranger gets nowhere."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import shoal
from mesh.cli.certs import make_set
from mesh.tls import WORKER, Tls, server_name
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from shoal.worker.v1 import worker_pb2, worker_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
STORY = "Write a long story about a shoal of fish that crosses the ocean."


@pytest.fixture
async def mesh(start_mesh: Callable[..., Any], tmp_path: Path) -> Any:
    """One mesh for all of it: two simulated workers with TLS."""
    make_set(tmp_path / "certs")
    env = {"SHOAL_TLS_DIR": str(tmp_path / "certs"), "SHOAL_WORKER_SIMULATED_ANSWER_TOKENS": "0"}
    return await asyncio.to_thread(start_mesh, env, engine="simulated", workers=2, tls=True)


async def test_a_mesh_with_tls_answers_resumes_and_keeps_strangers_out(
    mesh: Any, chat: Callable[..., Any], eventually: Callable[..., Awaitable[object]], tmp_path: Path
) -> None:
    await _answers_those_who_believe_its_ca(mesh)
    await _refuses_plain_talk(mesh)
    await _refuses_strangers(mesh, Path(mesh.state.tls_dir), tmp_path)
    await _is_shown_by_the_cli(mesh)
    await _goes_on_when_a_worker_is_killed(mesh, chat, eventually)
    await eventually(mesh.is_idle)


async def _answers_those_who_believe_its_ca(mesh: Any) -> None:
    assert mesh.url.startswith("https://")
    body = {"model": mesh.plan.model, "prompt": "Once", "max_tokens": 4, "seed": 3, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60, verify=mesh.trust) as client:
        answer = await client.post(f"{mesh.url}/v1/completions", json=body)
    assert answer.status_code == 200
    async with shoal.Client(mesh.state.grpc_address, tls=Path(mesh.state.tls_dir) / "ca.pem") as client:
        same = await client.complete("Once", max_tokens=4, seed=3, ignore_eos=True)
    assert same.text == answer.json()["choices"][0]["text"] != ""
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        await asyncio.to_thread(httpx.get, f"{mesh.url}/ready", trust_env=False)


async def _refuses_plain_talk(mesh: Any) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        await asyncio.to_thread(httpx.get, f"{mesh.url.replace('https', 'http')}/ready")
    async with shoal.Client(mesh.state.grpc_address) as client:
        with pytest.raises(shoal.Unavailable):
            await client.models()
    for role in ("scheduler-0", "worker-0"):
        with grpc.insecure_channel(_address(mesh, role)) as channel:
            assert _refusal(channel, role) is grpc.StatusCode.UNAVAILABLE


async def _refuses_strangers(mesh: Any, folder: Path, tmp_path: Path) -> None:
    """Another CA with all the right names; then the mesh's own CA with the wrong role."""
    make_set(tmp_path / "stranger")
    (tmp_path / "stranger" / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    key, certificate = ((tmp_path / "stranger" / f"gateway.{kind}").read_bytes() for kind in ("key", "pem"))
    stranger = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), key, certificate)
    for role in ("scheduler-0", "worker-0"):
        assert _refusal(_secure(mesh, role, stranger), role) is grpc.StatusCode.UNAVAILABLE
    worker = Tls(folder, WORKER).channel_credentials()
    assert _refusal(_secure(mesh, "worker-0", worker), "worker-0") is grpc.StatusCode.PERMISSION_DENIED
    assert all(process.state == "ready" for process in mesh.state.processes)
    assert 'shoal_tls_refused_calls_total{caller="worker"} 1.0' in _metrics(mesh, "worker-0")


def _address(mesh: Any, process: str) -> str:
    return f"127.0.0.1:{mesh.process(process).ports['grpc']}"


def _secure(mesh: Any, process: str, credentials: grpc.ChannelCredentials) -> grpc.Channel:
    name = server_name(process.partition("-")[0])
    return grpc.secure_channel(_address(mesh, process), credentials, [("grpc.ssl_target_name_override", name)])


def _refusal(channel: grpc.Channel, process: str) -> grpc.StatusCode:
    """How a call that business partners may make ends."""
    if process.startswith("scheduler"):
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchLoad(scheduler_pb2.WatchLoadRequest(), timeout=5)
    else:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Generate(worker_pb2.GenerateRequest(), timeout=5)
    with channel, pytest.raises(grpc.RpcError) as refused:
        next(call)
    return refused.value.code()


def _metrics(mesh: Any, process: str) -> str:
    return httpx.get(f"http://127.0.0.1:{mesh.process(process).ports['metrics']}/metrics").text


async def _is_shown_by_the_cli(mesh: Any) -> None:
    load = await mesh.load()
    assert len(load.workers) == 2
    command = [sys.executable, "-m", "mesh.cli.main", "chat", "--max-tokens", "16", "What is the capital of France?"]
    said = await asyncio.to_thread(
        subprocess.run, command, env=mesh.env | {"SHOAL_TLS_DIR": ""}, capture_output=True, text=True, timeout=60
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert len(said.stdout.split()) == 16


async def _goes_on_when_a_worker_is_killed(mesh: Any, chat: Callable[..., Any], eventually: Any) -> None:
    body = {"seed": 7, "ignore_eos": True, "max_tokens": 300}
    undisturbed = await chat(mesh, STORY, **body)
    under_way = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(chat(mesh, STORY, on_text=lambda _: under_way.set(), **body))
        await under_way.wait()
        [name] = await eventually(mesh.busy, timeout_s=5)
        assert not answer.done(), "the answer ended before the kill"
        mesh.kill(name)
    disturbed = answer.result()
    assert (disturbed.error, disturbed.done) == (None, True)
    assert disturbed.text == undisturbed.text
