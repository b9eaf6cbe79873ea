"""A whole mesh as real processes, in a home folder of its own, for tests to use and to hurt.

With the real model where its arithmetic counts; else with the simulated engine, which starts sooner and leaves the
machine to the rest: its text depends on the seed alone (at temperature 0 on nothing), so a token lost or doubled on the
way is seen.
"""

import itertools
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from mesh import models
from mesh.cli.plan import MeshPlan
from mesh.cli.state import MeshState, ProcessState
from mesh.cli.view import mesh_load
from mesh.errors import InvalidRequest
from shoal.scheduler.v1 import scheduler_pb2

READY_S = 90.0
STOP_S = 60.0


class Mesh:
    """A running mesh. `kill` and `signal` hit one process by its name, e.g. "worker-0"."""

    def __init__(self, home: Path, plan: MeshPlan, env: dict[str, str]) -> None:
        self.home = home
        self.plan = plan
        self.env = os.environ | {"SHOAL_HOME": str(home)} | env
        with (home / "supervisor.log").open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "mesh.cli.daemon", msgspec.json.encode(plan).decode()],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    @property
    def state(self) -> MeshState:
        return msgspec.json.decode((self.home / "run" / "mesh.json").read_bytes(), type=MeshState)

    @property
    def url(self) -> str:
        return self.state.http_url

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """httpx's `verify`: the mesh's CA, where it has one."""
        folder = self.state.tls_dir
        return ssl.create_default_context(cafile=Path(folder) / "ca.pem") if folder else True

    def process(self, name: str) -> ProcessState:
        return next(process for process in self.state.processes if process.name == name)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to a process; returns its pid."""
        pid = self.process(name).pid
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> int:
        return self.signal(name, signal.SIGKILL)

    def log(self, name: str) -> str:
        return (self.home / "run" / "logs" / f"{name}.log").read_text(errors="replace")

    async def load(self) -> scheduler_pb2.MeshLoad | None:
        return await mesh_load(self.state)

    async def busy(self) -> list[str]:
        """Names of the worker processes that run something now, as the scheduler has heard."""
        load = await self.load()
        workers = load.workers if load is not None else ()
        ports = {int(w.hello.address.rpartition(":")[2]) for w in workers if w.load.running_sequences}
        return [p.name for p in self.state.processes if p.role == "worker" and p.ports["grpc"] in ports]

    async def is_idle(self) -> bool:
        """Nothing runs or waits anywhere, and no block is in use."""
        load = await self.load()
        return load is not None and bool(load.workers) and all(
            not worker.load.used_blocks and not worker.load.running_sequences and not worker.load.waiting_sequences
            for worker in load.workers
        )  # fmt: skip

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=5, verify=self.trust)

    def is_ready(self) -> bool:
        with suppress(FileNotFoundError, httpx.HTTPError, msgspec.DecodeError):
            state = self.state
            ready = all(process.state == "ready" for process in state.processes)
            return ready and state.phase == "ready" and self.get("/ready").status_code == 200
        return False

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            ended = self._supervisor.poll()
            if ended is not None or time.monotonic() > deadline:
                pytest.fail(f"mesh not ready (supervisor: {ended})\n{self._tails()}")
            time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM to the supervisor; returns its exit code. Fails if a process of the mesh is left."""
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._supervisor.pid).children(recursive=True)
            self._supervisor.terminate()
            code = self._supervisor.wait(STOP_S)
            _, left = psutil.wait_procs(family, timeout=5)
            for process in left:
                process.kill()
            assert not left, f"left behind: {left}"
            return code
        return self._supervisor.wait(1)

    def _tails(self) -> str:
        logs = [self.home / "supervisor.log", *(self.home / "run" / "logs").glob("*.log")]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@contextmanager
def running(home: Path, plan: MeshPlan, env: dict[str, str]) -> Iterator[Mesh]:
    (home / "models").mkdir(parents=True)
    folder = models.find(plan.model)
    (home / "models" / plan.model).symlink_to(folder.path)
    mesh = Mesh(home, plan, env)
    try:
        mesh.wait_ready()
        unread = [process.name for process in mesh.state.processes if "nothing reads it" in mesh.log(process.name)]
        assert not unread, f"variables that {unread} do not know: {env}"
        yield mesh
    finally:
        mesh.stop()


@pytest.fixture(scope="session")
def model() -> str:
    """The default model, which must have been pulled."""
    try:
        models.find(models.DEFAULT_MODEL)
    except InvalidRequest as error:
        pytest.fail(error.message)
    return models.DEFAULT_MODEL


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP/gRPC receiver that keeps what it hears: the service's name with each span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: bytes) -> list[tuple[str, trace_pb2.Span]]:
        return [(service, span) for service, span in self.spans if span.trace_id == trace_id]


@pytest.fixture(scope="session")
def collector() -> Iterator[tuple[Collector, int]]:
    """Hears the spans of `mesh`; with its port."""
    received = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield received, port
    server.stop(None).wait()


@pytest.fixture(scope="session")
def mesh(model: str, collector: tuple[Collector, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One gateway, one scheduler, one worker with the real model, traced, for tests that break nothing.

    In fp32, for what it says is known: in lesser precisions near ties fall either way.
    """
    env = {"SHOAL_OTLP_ENDPOINT": f"http://127.0.0.1:{collector[1]}"}
    with running(tmp_path_factory.mktemp("mesh"), MeshPlan(model=model, precision="fp32"), env) as mesh:
        yield mesh


@contextmanager
def starting(model: str, home: Path) -> Iterator[Callable[..., Mesh]]:
    """A function that starts meshes in folders of their own below `home`; they end with the block."""
    with ExitStack() as meshes:
        numbers = itertools.count()

        def start(env: dict[str, str] | None = None, **plan: str | int | bool) -> Mesh:
            folder = home / f"mesh-{next(numbers)}"
            return meshes.enter_context(running(folder, MeshPlan(model=model, **plan), env or {}))  # type: ignore[arg-type]

        yield start


@pytest.fixture
def start_mesh(model: str, tmp_path: Path) -> Iterator[Callable[..., Mesh]]:
    """`start_mesh(workers=2, env={...})` starts a mesh of its own for a test that breaks it."""
    with starting(model, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_mesh(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Mesh]]:
    """The same for a module whose tests leave their mesh as they found it."""
    with starting(model, tmp_path_factory.mktemp("shared")) as start:
        yield start


class Answer(msgspec.Struct):
    """A streamed answer as a client saw it, to its very end."""

    text: str = ""
    finish: str | None = None
    error: dict | None = None
    usage: dict | None = None
    done: bool = False
    status: int = 0
    last_byte_at: float = 0.0


async def stream_chat(
    mesh: Mesh, prompt: str, max_tokens: int = 64, on_text: Callable[[Answer], object] = lambda _: None, **body: object
) -> Answer:
    """Read one streamed chat answer over HTTP. `on_text` is called after each piece of text."""
    request = {
        "model": mesh.plan.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    answer = Answer()
    async with (
        httpx.AsyncClient(timeout=120, verify=mesh.trust) as client,
        client.stream("POST", f"{mesh.url}/v1/chat/completions", json=request) as response,
    ):
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = msgspec.json.decode(await response.aread()).get("error")
            return answer
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                answer.last_byte_at = time.monotonic()
                _take(answer, line.removeprefix("data: "))
                if answer.text:
                    on_text(answer)
    return answer


def _take(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.done = True
        return
    event = msgspec.json.decode(data)
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        answer.text += choice["delta"].get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish


@pytest.fixture
def chat() -> Callable[..., Awaitable[Answer]]:
    """`await chat(mesh, "question")` streams an answer over HTTP to its end."""
    return stream_chat
