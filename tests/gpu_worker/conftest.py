"""A real worker for its tests: a tiny Llama of random weights on disk, its engine process, a scheduler that records."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import save_file

from gpu_worker.kernels import library, program
from gpu_worker.settings import WorkerSettings
from gpu_worker.worker import Worker
from mesh.client import connect
from mesh.models import find
from mesh.telemetry import Telemetry
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from shoal.worker.v1 import worker_pb2, worker_pb2_grpc

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    hidden, feed_forward, kv = 32, 64, 16
    shapes = {"model.embed_tokens.weight": (256, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (feed_forward, hidden),
            f"{prefix}.mlp.up_proj.weight": (feed_forward, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, feed_forward),
        }
    weights = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    norms += [f"model.layers.{at}.{n}_layernorm.weight" for at in range(2) for n in ("input", "post_attention")]
    return weights | {name: torch.ones(hidden) for name in norms}


def _tokenizer() -> dict[str, Any]:
    """Token 0 ends an answer, 1 to 95 are printable ASCII, the others characters that nobody uses."""
    vocab = {chr(31 + index) if index < 96 else chr(0x400 + index): index for index in range(1, 256)}
    end = {"id": 0, "content": "<end>", "special": True}
    return {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": [end]}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of two small layers, 256 tokens, 8,192 of context."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (folder / "tokenizer_config.json").write_text("{}")
    save_file(_weights(), folder / "model.safetensors")
    return folder


class RecordingScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Welcomes workers and keeps their reports."""

    def __init__(self) -> None:
        self.hellos: list[scheduler_pb2.Hello] = []
        self.loads: list[scheduler_pb2.Load] = []
        self.orders: asyncio.Queue[scheduler_pb2.WorkerOrder] = asyncio.Queue(16)

    async def Attach(self, reports: Any, context: Any) -> AsyncIterator[scheduler_pb2.WorkerOrder]:
        async for report in reports:
            if report.HasField("hello"):
                self.hellos.append(report.hello)
                yield scheduler_pb2.WorkerOrder(welcome=scheduler_pb2.Welcome(scheduler_id="recording"))
            else:
                self.loads.append(report.load)
            while not self.orders.empty():
                yield self.orders.get_nowait()


@dataclass
class Rig:
    """A worker that serves, as its neighbours see it."""

    worker: Worker
    folder: Path
    scheduler: RecordingScheduler
    channel: grpc.aio.Channel
    stopping: asyncio.Event
    serving: "asyncio.Task[None]"
    telemetry: Telemetry
    ids: list[int] = field(default_factory=list)

    @property
    def stub(self) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    @property
    def bridge(self) -> Any:
        assert self.worker.bridge is not None
        return self.worker.bridge

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(self.bridge.pid)

    def request(self, request_id: str = "", attempt: int = 1, **fields: Any) -> worker_pb2.GenerateRequest:
        """A request of one greedy choice of 16 tokens that no token ends; `fields` go into GenerateRequest."""
        self.ids.append(len(self.ids))
        request = worker_pb2.GenerateRequest(
            prompt_ids=fields.pop("prompt_ids", range(1, 9)),
            choices=fields.pop("choices", [worker_pb2.Choice(index=0)]),
            tokenizer_digest=fields.pop("tokenizer_digest", find(str(self.folder)).tokenizer_digest()),
            **fields,
        )
        request.meta.request_id = request_id or f"request-{self.ids[-1]}"
        request.meta.attempt = attempt
        if not request.HasField("sampling"):
            request.sampling.temperature = 0
            request.sampling.max_tokens = 16
        request.sampling.ignore_eos = request.sampling.WhichOneof("structure") is None
        return request

    async def health(self, service: str = "") -> str:
        """What grpc.health.v1 answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=5)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    async def is_serving(self) -> bool:
        return await self.health() == "SERVING"

    def sample(self, name: str, **labels: str) -> float:
        """The present value of a metric."""
        return self.telemetry.registry.get_sample_value(f"shoal_worker_{name}", labels) or 0.0

    @property
    def idle(self) -> bool:
        """Whether the engine holds no request and no block but cached ones."""
        load = self.bridge.load
        return load is not None and not load.running and load.used_blocks == 0 and not self.bridge.running()


@asynccontextmanager
async def _scheduler() -> AsyncIterator[tuple[RecordingScheduler, str]]:
    scheduler, server = RecordingScheduler(), grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield scheduler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def _worker(folder: Path, schedulers: str, settings: dict[str, Any]) -> tuple[Worker, Telemetry]:
    given = {
        "model": str(folder), "port": 0, "schedulers": schedulers, "kv_bytes": "8MiB", "threads": 1, "device": "cpu",
        "context_tokens": 8192, "prefill_chunk": 16, "precision": "fp32", "worker_id": "worker-under-test",
        "park_s": 1, "drain_s": 2, "simulated_kv_bytes_per_token": 256, "simulated_step_ms": 1,
    }  # fmt: skip
    chosen = WorkerSettings.load(**(given | settings))
    handlers = list(logging.getLogger().handlers)
    telemetry = Telemetry(chosen, chosen.worker_id)
    logging.getLogger().handlers[:] = handlers  # the log stays pytest's
    return Worker(chosen, telemetry, chosen.worker_id, "0.1.0"), telemetry


@asynccontextmanager
async def _rig(folder: Path, **settings: Any) -> AsyncIterator[Rig]:
    async with _scheduler() as (scheduler, address):
        worker, telemetry = _worker(folder, address, settings)
        stopping = asyncio.Event()
        serving = asyncio.ensure_future(worker.serve(stopping))
        try:
            async with asyncio.timeout(60):
                listening = asyncio.ensure_future(worker.listening.wait())
                await asyncio.wait([listening, serving], return_when=asyncio.FIRST_COMPLETED)
                assert listening.done(), serving.exception()
            async with connect(f"127.0.0.1:{worker.port}") as channel:
                yield Rig(worker, folder, scheduler, channel, stopping, serving, telemetry)
        finally:
            stopping.set()
            await asyncio.wait([serving])
            telemetry.stop()


async def _ready(rig: Rig) -> Rig:
    """`rig`, once it says SERVING."""
    call = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    async for reply in call:
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            call.cancel()
            return rig
    raise AssertionError("the worker ended before it was ready")


@pytest.fixture(scope="session")
def own_worker(tiny_model: Path) -> Callable[..., Any]:
    """`async with own_worker(**settings) as rig`: a worker of the test's own, from before it is ready.

    With kind="simulated" it is ready sooner: for what does not depend on what the engine computes.
    """
    return partial(_rig, tiny_model)


@pytest.fixture(scope="session")
def ready() -> Callable[[Rig], Awaitable[Rig]]:
    """`await ready(rig)` until health says SERVING."""
    return _ready


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def rig(tiny_model: Path) -> AsyncIterator[Rig]:
    """The worker that tests share which leave it as they found it."""
    async with _rig(tiny_model) as rig:
        yield await _ready(rig)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine on which no program is found, and nothing was built before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    kept = library.library, program.kernels
    for one in kept:
        one.cache_clear()
    yield tmp_path
    for one in kept:
        one.cache_clear()
