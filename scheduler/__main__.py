"""`python -m scheduler`: one replica, from its settings to a clean exit. Exit codes: mesh/process.py."""

import asyncio
import logging
import secrets
import sys
import time

from mesh.callers import only_from
from mesh.process import run_service, tls_of
from mesh.server import Server
from mesh.telemetry import Telemetry
from mesh.tls import GATEWAY, OPERATOR, WORKER
from scheduler.dispatcher import Dispatcher
from scheduler.metrics import Metrics
from scheduler.service import SchedulerService
from scheduler.settings import SchedulerSettings
from shoal.scheduler.v1 import scheduler_pb2_grpc as rpc

SERVICE = "shoal.scheduler.v1.SchedulerService"
CALLERS = (GATEWAY, WORKER, OPERATOR)
# Nothing runs here, so there is little to wait for: streams only have to be told.
DRAIN_S = 1.0
log = logging.getLogger("shoal.scheduler")


async def serve(settings: SchedulerSettings, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    """Listen until `stopping`, then drain. Ready as soon as it listens: it needs nothing but workers to come."""
    dispatcher = Dispatcher(settings.policies(), time.monotonic())
    service = SchedulerService(dispatcher, Metrics(telemetry.registry), telemetry.instance)
    tls = tls_of(settings)
    server = Server(
        {SERVICE: lambda grpc_server: rpc.add_SchedulerServiceServicer_to_server(service, grpc_server)},
        [*telemetry.server_interceptors(), *only_from(CALLERS, tls, telemetry.registry)],
    )
    grpc_port = await server.start(settings.host, settings.port, tls)
    ports = {"event": "listening", "grpc_port": grpc_port, "metrics_port": telemetry.serve_metrics()}
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(service.run(settings.tick_s))
        await server.set_serving(True)
        log.info("listening", extra={"fields": ports})
        await stopping.wait()
        log.info("draining")
        await server.set_serving(False)
        await service.drain(min(DRAIN_S, settings.drain_s))
        await server.drain(min(DRAIN_S, settings.drain_s))
        ticking.cancel()


def main() -> int:
    """The process's exit code."""
    return run_service(SchedulerSettings, lambda _: f"scheduler-{secrets.token_hex(4)}", serve)


if __name__ == "__main__":
    sys.exit(main())
