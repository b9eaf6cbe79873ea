"""`python -m cache_service`: one replica, from its settings to a clean exit. Exit codes: mesh/process.py."""

import asyncio
import logging
import secrets
import sys
from contextlib import aclosing

from cache_service.cold import ColdStore
from cache_service.heap import keep_freed
from cache_service.metrics import Metrics
from cache_service.redis_bundles import RedisBundles
from cache_service.service import CacheService
from cache_service.settings import CacheSettings
from mesh.callers import only_from
from mesh.process import run_service, tls_of
from mesh.server import InFlight, Server
from mesh.telemetry import Telemetry
from mesh.tls import OPERATOR, WORKER

CALLERS = (WORKER, OPERATOR)
# Else gRPC lets every stream bring what the network carries, megabytes of each, before anybody reads it.
OPTIONS = (("grpc.http2.bdp_probe", 0),)

log = logging.getLogger("shoal.cache")


async def serve(settings: CacheSettings, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    """Listen until `stopping`, then drain. Health says SERVING while Redis answers; without it, all is a miss."""
    metrics, in_flight, tls = Metrics(telemetry.registry), InFlight(), tls_of(settings)
    redis = RedisBundles(settings.redis_url, settings.redis_timeout_s, settings.ttl_s)
    async with aclosing(redis):
        store = ColdStore(redis, settings.limits(), metrics)
        service = CacheService(store, settings.limits(), metrics, in_flight)
        interceptors = [*telemetry.server_interceptors(), *only_from(CALLERS, tls, telemetry.registry)]
        server = Server(service.registration(), interceptors, in_flight, OPTIONS)
        grpc_port = await server.start(settings.host, settings.port, tls)
        ports = {"event": "listening", "grpc_port": grpc_port, "metrics_port": telemetry.serve_metrics()}
        log.info("listening", extra={"fields": ports})
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(store.watch(server.set_serving))
            await stopping.wait()
            log.info("draining")
            await server.drain(settings.drain_s)
            watching.cancel()


def main() -> int:
    """The process's exit code."""
    keep_freed()
    return run_service(CacheSettings, lambda _: f"cache-{secrets.token_hex(4)}", serve)


if __name__ == "__main__":
    sys.exit(main())
