"""`python -m gateway`: the public API of a mesh, HTTP and gRPC in one process."""

import asyncio
import logging
import os
import sys
from importlib import metadata

from gateway.service import load_models, running
from gateway.settings import GatewaySettings
from mesh.errors import ShoalError
from mesh.server import run
from mesh.settings import SettingsError, unknown_variables
from mesh.telemetry import Telemetry

log = logging.getLogger("shoal.gateway")


async def serve(settings: GatewaySettings, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then drain."""
    telemetry = Telemetry(settings, instance=f"gateway-{os.getpid()}", version=metadata.version("shoal"))
    for warning in unknown_variables(GatewaySettings):
        log.warning(warning)
    try:
        texts = await load_models(settings)
        metrics_port = telemetry.serve_metrics()
        async with running(settings, telemetry, texts) as gateway:
            ports = {"http_port": gateway.http_port, "grpc_port": gateway.grpc_port, "metrics_port": metrics_port}
            log.info("listening", extra={"fields": {"event": "listening", **ports}})
            await stopping.wait()
    finally:
        telemetry.stop()


def main() -> int:
    """Exit code 0 after a drain, 2 for settings that cannot be used."""
    try:
        settings = GatewaySettings.load()
        run(lambda stopping: serve(settings, stopping))
    except (SettingsError, ShoalError) as error:
        print(f"shoal gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
