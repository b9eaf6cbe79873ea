"""A worker process that is given a damaged model: one line that says what to do, exit code 2, and never SERVING."""

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file, save_file

from mesh.server import LIVENESS
from mesh.settings import UNUSABLE_SETTINGS

pytestmark = pytest.mark.asyncio(loop_scope="session")


def with_a_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] = torch.nan
    save_file(weights, folder / "model.safetensors")


def with_three_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


def with_half_a_gguf(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "half.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 40)


def with_weights_that_overflow(folder: Path) -> None:
    """Finite, each of them: it loads, and fails when it is to make its first token."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.gate_proj.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors")


DAMAGES: dict[Callable[[Path], None], tuple[str, ...]] = {
    with_a_nan: ("model.safetensors, tensor model.layers.1.mlp.down_proj.weight: holds values that are not finite",),
    with_three_layers: ("config.json, tensor model.layers.2.", "missing; expected shape [32"),
    with_weights_that_overflow: ("its weights overflow: the first answer's logits are no numbers",),
    with_half_a_gguf: ("half.gguf: not a whole GGUF file: it claims 18446744073709551615 tensors", "fetch it again"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def statuses_until_the_end(port: int, process: asyncio.subprocess.Process) -> set[tuple[str, str]]:
    """Every (service, status) that health has told while the process lived."""
    seen: set[tuple[str, str]] = set()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        ended = asyncio.ensure_future(process.wait())
        while not ended.done():
            for service in ("", LIVENESS):
                try:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)
                except grpc.aio.AioRpcError:
                    continue  # not yet listening, or no longer
                seen.add((service, health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)))
            await asyncio.wait([ended], timeout=0.02)
    return seen


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_model_ends_the_process_in_one_line_without_ever_serving(
    damage: Callable[[Path], None], tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gpu_worker",
        env=os.environ | {"SHOAL_WORKER_MODEL": str(folder), "SHOAL_WORKER_HOST": "127.0.0.1",
                          "SHOAL_WORKER_PORT": str(port), "SHOAL_WORKER_METRICS_PORT": "0"},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reading = asyncio.ensure_future(process.stderr.read())
    seen = await statuses_until_the_end(port, process)
    told = (await reading).decode()
    assert process.returncode == UNUSABLE_SETTINGS
    assert "Traceback" not in told
    last = json.loads(told.splitlines()[-1])
    assert last["level"] == "error"
    assert last["message"].startswith("SHOAL_WORKER_MODEL cannot be served: ")
    for words in (str(folder), *DAMAGES[damage]):
        assert words in last["message"]
    assert ("", "SERVING") not in seen
    assert (LIVENESS, "SERVING") in seen, "health was never heard"


async def test_the_worker_itself_says_that_its_model_is_unusable(own_worker: Any, tmp_path: Path) -> None:
    from gpu_worker.worker import ModelUnusable

    (tmp_path / "tokenizer.json").write_text("{}")
    async with own_worker(kind="simulated", model=str(tmp_path)) as rig:
        with pytest.raises(ModelUnusable, match=r"^SHOAL_WORKER_MODEL cannot be served: .*vocab_size is 0"):
            await rig.serving


async def test_the_worker_blames_the_pool_and_not_the_model_for_a_pool_too_small(
    own_worker: Any, tiny_model: Path
) -> None:
    from gpu_worker.worker import ModelUnusable

    async with own_worker(kind="simulated", model=str(tiny_model), kv_bytes=1024) as rig:
        with pytest.raises(ModelUnusable, match=r"^SHOAL_WORKER_KV_BYTES is 1024 bytes"):
            await rig.serving
