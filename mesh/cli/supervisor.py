"""The local mesh as one tree of processes: started in order, kept running, stopped so that no request is lost.

Gateways stop first and wait for their streams, then workers, schedulers and Valkey, each within its drain time.
"""

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh import models
from mesh.cli import state
from mesh.cli.grace import grace_s, stop_s
from mesh.cli.plan import HOST, MeshPlan, ProcessSpec, processes
from mesh.cli.process import ManagedProcess
from mesh.client import connect

PROBE_TIMEOUT_S = 1.0
STOP_ORDER = ("gateway", "worker", "scheduler", "valkey")


class Supervisor:
    """Owns every process of a local mesh. `on_change` hears of each new state."""

    def __init__(self, plan: MeshPlan, on_change: Callable[[state.MeshState], None] = lambda _: None) -> None:
        self._plan = plan
        self._specs = processes(plan)
        self._on_change = on_change
        self._phase = "starting"
        self._message = ""
        self._notices: list[str] = []
        self._processes = [ManagedProcess(spec, probe, self._publish, restart=plan.restart) for spec in self._specs]

    async def run(self, stopping: asyncio.Event) -> None:
        """Start everything, keep it running until `stopping` is set, stop everything. Raises StartFailed."""
        self._publish()
        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(process.run(), name=process.spec.name)
                for waiter in (self._announce_ready(), self._stop_when(stopping)):
                    group.create_task(waiter)
        except* Exception as failures:
            self._phase, self._message = "failed", "\n".join(str(error) for error in failures.exceptions)
            await self._stop_all()
            self._publish()
            raise failures.exceptions[0] from None

    async def _announce_ready(self) -> None:
        for process in self._processes:
            await process.ready.wait()
        if self._phase == "starting":
            self._phase = "ready"
            self._notices = unread_variables(self._processes)
            self._publish()

    async def _stop_when(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._phase = "stopping"
        self._publish()
        await self._stop_all()
        # _announce_ready may wait for ever for a process that never came up.
        for process in self._processes:
            process.ready.set()
        state.state_file().unlink(missing_ok=True)

    def kill(self) -> None:
        """End every process at once, for somebody who will not wait for the draining."""
        for process in self._processes:
            process.kill()

    async def _stop_all(self) -> None:
        for role in STOP_ORDER:
            group = [process for process in self._processes if process.spec.role == role]
            await asyncio.gather(*(process.stop(grace_s(role, os.environ | process.spec.env)) for process in group))

    def snapshot(self) -> state.MeshState:
        gateways = [spec for spec in self._specs if spec.role == "gateway"]
        return state.MeshState(
            supervisor_pid=os.getpid(),
            supervisor_created=psutil.Process().create_time(),
            phase=self._phase_now(),
            model=models.folder_of(self._plan.model).name,
            http_urls=[f"http://{HOST}:{spec.ports['http']}" for spec in gateways],
            grpc_addresses=[f"{HOST}:{spec.ports['grpc']}" for spec in gateways],
            scheduler_addresses=[f"{HOST}:{spec.ports['grpc']}" for spec in self._specs if spec.role == "scheduler"],
            processes=[process.state() for process in self._processes],
            message=self._message,
            notices=self._notices,
            stop_s=stop_s((spec.role for spec in self._specs), os.environ),
        )

    def _phase_now(self) -> str:
        """Once ready, the mesh is degraded while a process is not."""
        whole = all(process.phase == "ready" for process in self._processes)
        return "degraded" if self._phase == "ready" and not whole else self._phase

    def _publish(self) -> None:
        snapshot = self.snapshot()
        state.write(snapshot)
        self._on_change(snapshot)


def unread_variables(started: Iterable[ManagedProcess]) -> list[str]:
    """A sentence for each variable that nothing reads: several services may report it, the one with a guess is best."""
    best: dict[str, str] = {}
    for sentence in sorted(set().union(*(process.unread_variables() for process in started)), key=len):
        best[sentence.split()[0]] = sentence
    return [best[variable] for variable in sorted(best)]


async def probe(spec: ProcessSpec) -> bool:
    """Whether the process can do its work: health SERVING, and for a gateway also /ready; PING for Valkey."""
    if spec.role == "valkey":
        return await _ping(spec.ports["redis"])
    if not await _serving(spec.ports["grpc"]):
        return False
    return spec.role != "gateway" or await asyncio.to_thread(_http_ok, f"http://{HOST}:{spec.ports['http']}/ready")


async def _serving(port: int) -> bool:
    async with connect(f"{HOST}:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _http_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def _ping(port: int) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"PING\r\n")
            answer = await reader.readline()
            writer.close()
            await writer.wait_closed()
            return answer.startswith(b"+PONG")
    except (OSError, TimeoutError):
        return False
