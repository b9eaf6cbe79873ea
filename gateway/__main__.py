"""`python -m gateway`: the public API of a mesh, HTTP and gRPC in one process. Exit codes: mesh/process.py."""

import asyncio
import logging
import secrets
import sys

from redis.asyncio.connection import parse_url

from gateway.service import load_models, running
from gateway.settings import GatewaySettings
from mesh.errors import InvalidRequest
from mesh.process import run_service
from mesh.settings import SettingsError
from mesh.telemetry import Telemetry

log = logging.getLogger("shoal.gateway")


async def serve(settings: GatewaySettings, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then drain. Raises SettingsError."""
    _check_redis_url(settings)
    try:
        texts = await load_models(settings)
    except InvalidRequest as error:
        raise SettingsError(f"{settings.variable('model')}: {error.message}") from None
    metrics_port = telemetry.serve_metrics()
    async with running(settings, telemetry, texts) as gateway:
        ports = {"http_port": gateway.http_port, "grpc_port": gateway.grpc_port, "metrics_port": metrics_port}
        log.info("listening", extra={"fields": {"event": "listening", **ports}})
        await stopping.wait()


def _check_redis_url(settings: GatewaySettings) -> None:
    """A Redis that is away is no reason not to start; an address that can be none is."""
    try:
        if settings.redis_url:
            parse_url(settings.redis_url)
    except ValueError as error:
        raise SettingsError(
            f"{settings.variable('redis_url')}: {error}"
        ) from None  # not the URL: it may hold a password


def main() -> int:
    """The process's exit code."""
    return run_service(GatewaySettings, lambda _: f"gateway-{secrets.token_hex(4)}", serve)


if __name__ == "__main__":
    sys.exit(main())
