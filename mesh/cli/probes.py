"""What the supervisor asks its processes: can you work, and who is attached to whom."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.cli.plan import ProcessSpec
from mesh.cli.ports import HOST
from mesh.client import connect
from mesh.tls import OPERATOR, SCHEDULER, Tls
from shoal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

PROBE_TIMEOUT_S = 1.0


def operator(tls_dir: str) -> Tls | None:
    """The CLI's own identity; None for a mesh without TLS. Raises TlsError."""
    return Tls(Path(tls_dir), OPERATOR) if tls_dir else None


async def probe(spec: ProcessSpec, tls: Tls | None = None) -> bool:
    """Whether the process can do its work: health SERVING, and for a gateway also /ready; PING for Valkey."""
    if spec.role == "valkey":
        return await _ping(spec.ports["redis"])
    if not await _serving(spec, tls):
        return False
    return spec.role != "gateway" or await asyncio.to_thread(_is_ready, spec, tls)


async def _serving(spec: ProcessSpec, tls: Tls | None) -> bool:
    async with connect(spec.address, tls, spec.role) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _is_ready(gateway: ProcessSpec, tls: Tls | None) -> bool:
    url = f"{scheme(tls)}://{HOST}:{gateway.ports['http']}/ready"
    context = tls.http_client_context() if tls is not None else None
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S, context=context) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def scheme(tls: Tls | None) -> str:
    """Of the gateway's URLs."""
    return "http" if tls is None else "https"


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


async def mesh_load(
    address: str, tls: Tls | None = None, timeout_s: float = PROBE_TIMEOUT_S
) -> scheduler_pb2.MeshLoad | None:
    """The mesh as the scheduler at `address` sees it; None if it does not answer."""
    async with connect(address, tls, SCHEDULER) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchLoad(scheduler_pb2.WatchLoadRequest(), timeout=timeout_s)
        try:
            load = await call.read()
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
    return load if isinstance(load, scheduler_pb2.MeshLoad) else None


async def unattached(
    schedulers: Iterable[ProcessSpec], workers: Iterable[ProcessSpec], tls: Tls | None = None
) -> list[str]:
    """A sentence for each of `schedulers` that not all of `workers` have told their load."""
    missing = []
    for scheduler in schedulers:
        load = await mesh_load(scheduler.address, tls)
        heard = {state.hello.address for state in load.workers if state.HasField("load")} if load is not None else set()
        if absent := [worker.name for worker in workers if worker.address not in heard]:
            missing.append(f"{', '.join(absent)} not attached to {scheduler.name}")
    return missing
