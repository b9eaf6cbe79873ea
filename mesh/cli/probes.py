"""What the supervisor asks its processes: can you work, and who is attached to whom."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.cli.plan import HOST, ProcessSpec
from mesh.client import connect
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

PROBE_TIMEOUT_S = 1.0


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


async def mesh_load(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> scheduler_pb2.MeshLoad | None:
    """The mesh as the scheduler at `address` sees it; None if it does not answer."""
    async with connect(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchLoad(scheduler_pb2.WatchLoadRequest(), timeout=timeout_s)
        try:
            load = await call.read()
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
    return load if isinstance(load, scheduler_pb2.MeshLoad) else None


async def unattached(schedulers: Iterable[ProcessSpec], workers: Iterable[ProcessSpec]) -> list[str]:
    """A sentence for each of `schedulers` that has not heard each of `workers` say that it is well."""
    missing = []
    for scheduler in schedulers:
        load = await mesh_load(scheduler.address)
        well = {state.hello.address for state in load.workers if state.load.healthy} if load is not None else set()
        if absent := [worker.name for worker in workers if worker.address not in well]:
            missing.append(f"{', '.join(absent)} not attached to {scheduler.name}")
    return missing
