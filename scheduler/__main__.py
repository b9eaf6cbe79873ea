"""`python -m scheduler`: one replica, from its settings to a clean exit."""

import asyncio
import logging
import secrets
import sys
import time

from mesh.server import Server, run
from mesh.settings import SettingsError, unknown_variables
from mesh.telemetry import Telemetry
from scheduler.dispatcher import Dispatcher
from scheduler.metrics import Metrics
from scheduler.service import SchedulerService
from scheduler.settings import SchedulerSettings
from shoal.scheduler.v1 import scheduler_pb2_grpc as rpc

SERVICE = "shoal.scheduler.v1.SchedulerService"
# Nothing runs here, so there is little to wait for: streams only have to be told.
DRAIN_S = 1.0
log = logging.getLogger("shoal.scheduler")


async def serve(settings: SchedulerSettings, stopping: asyncio.Event) -> None:
    """Listen until `stopping`, then drain. Ready as soon as it listens: it needs nothing but workers to come."""
    scheduler_id = f"scheduler-{secrets.token_hex(4)}"
    telemetry = Telemetry(settings, scheduler_id)
    for sentence in unknown_variables(SchedulerSettings):
        log.warning(sentence)
    dispatcher = Dispatcher(settings.policies(), time.monotonic())
    service = SchedulerService(dispatcher, Metrics(telemetry.registry), scheduler_id)
    server = Server(
        {SERVICE: lambda grpc_server: rpc.add_SchedulerServiceServicer_to_server(service, grpc_server)},
        telemetry.server_interceptors(),
    )
    grpc_port = await server.start(settings.host, settings.port)
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
    telemetry.stop()


def main() -> None:
    """Exit code 0 after a drain, 2 for settings that cannot be used."""
    try:
        settings = SchedulerSettings.load()
    except SettingsError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        sys.exit(2)
    run(lambda stopping: serve(settings, stopping))


if __name__ == "__main__":
    main()
