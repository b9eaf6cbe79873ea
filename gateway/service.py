"""One gateway process: builds the parts, keeps health true, and stops in an order that loses nothing.

Stopping (SIGTERM): readiness goes false, new requests get 503 or UNAVAILABLE with a hint to come back, running answers
may end within `drain_s`, what is left gets an in-band error, then both servers close.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.booking import Books
from gateway.catalogue import Catalogue
from gateway.core import Core
from gateway.grpc.service import SERVICE, InferenceService, receiving
from gateway.http.answering import HttpLimits
from gateway.http.app import build_app
from gateway.http.server import HttpServer
from gateway.limits import Limiter
from gateway.metrics import Metrics
from gateway.prompt.offload import Offload
from gateway.prompt.text_model import TextModel
from gateway.relay import Mesh, Relay
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from gateway.validate import Validator
from mesh import models
from mesh.clients.scheduler import Schedulers
from mesh.clients.worker import Workers
from mesh.errors import Unavailable
from mesh.process import tls_of
from mesh.server import InFlight, Server
from mesh.telemetry import Telemetry
from mesh.tls import Tls

log = logging.getLogger("shoal.gateway")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway: where it listens, and what keeps it from serving (empty = ready)."""

    http_port: int
    grpc_port: int
    core: Core

    @property
    def missing(self) -> list[str]:
        return self.core.missing


async def load_models(settings: GatewaySettings) -> dict[str, TextModel]:
    """The tokenizers of every model in the settings, by served name. Raises InvalidRequest that says what to do."""
    folders = [models.find(name) for name in settings.models]
    texts = [await asyncio.to_thread(TextModel.load, folder) for folder in folders]
    return {text.name: text for text in texts}


def load_tenants(settings: GatewaySettings) -> Tenants:
    """Everyone who may ask. Raises SettingsError."""
    if not settings.tenants_file:
        return Tenants.open()
    return Tenants.load(Path(settings.tenants_file), keys_required=not settings.allow_anonymous)


def build_core(settings: GatewaySettings, tenants: Tenants, mesh: Mesh, offload: Offload) -> Core:
    """What both front doors stand on."""
    return Core(
        tenants=tenants,
        validator=Validator(mesh.catalogue, offload, settings.max_choices, settings.request_timeout_s),
        relay=Relay(mesh),
        catalogue=mesh.catalogue,
        metrics=mesh.metrics,
        in_flight=InFlight(),
        max_in_flight=settings.max_in_flight,
    )


@asynccontextmanager
async def running(
    settings: GatewaySettings, telemetry: Telemetry, texts: Mapping[str, TextModel]
) -> AsyncIterator[Gateway]:
    """A gateway that serves inside the block and drains when it is left."""
    tenants = load_tenants(settings)
    metrics = Metrics(telemetry.registry)
    tls = tls_of(settings)
    schedulers = Schedulers(settings.schedulers, tls)
    async with (
        Offload() as offload,
        Limiter(settings.redis_url, registry=telemetry.registry) as limiter,
        Workers(tls) as workers,
        _until_left(schedulers.run()),
    ):
        mesh = Mesh(
            schedulers=schedulers,
            workers=workers,
            catalogue=Catalogue(texts, schedulers),
            books=Books(limiter, metrics),
            metrics=metrics,
            queue_s=settings.queue_timeout_s,
            no_scheduler_s=settings.no_scheduler_s,
        )
        core = build_core(settings, tenants, mesh, offload)
        async with (
            _doors(settings, telemetry, core, tls) as (server, gateway),
            _until_left(_keep_health_true(server, core, schedulers)),
        ):
            yield gateway
            await _drain(settings, server, core)


@asynccontextmanager
async def _doors(
    settings: GatewaySettings, telemetry: Telemetry, core: Core, tls: Tls | None
) -> AsyncIterator[tuple[Server, Gateway]]:
    """Both servers, listening."""
    most_bytes = settings.max_body_bytes
    service = InferenceService(core, settings.client_write_timeout_s, most_bytes)
    server = Server(
        {SERVICE: service.add_to}, telemetry.server_interceptors(), core.in_flight, options=receiving(most_bytes)
    )
    limits = HttpLimits(most_bytes, settings.body_timeout_s, settings.sse_commit_s, settings.max_connections)
    asked = settings.client_certs == "required"
    http = HttpServer(
        build_app(core, limits),
        settings.host,
        settings.http_port,
        settings.client_write_timeout_s,
        tls.http_server_context(client_certificates=asked) if tls is not None else None,
    )
    grpc_port = await server.start(settings.host, settings.grpc_port, tls, client_certificates=asked)
    async with asyncio.TaskGroup() as group:
        group.create_task(http.serve())
        await http.listening.wait()
        try:
            yield server, Gateway(http.port, grpc_port, core)
        finally:
            http.should_exit = True
            await server.drain(0)


async def _keep_health_true(server: Server, core: Core, schedulers: Schedulers) -> None:
    """grpc.health.v1 says SERVING while nothing is missing."""
    said: bool | None = None
    while True:
        ready = not core.missing
        if ready is not said:
            said = ready
            await server.set_serving(ready)
            log.info("ready" if ready else "not ready: %s", *([] if ready else ["; ".join(core.missing)]))
        await schedulers.changed()


async def _drain(settings: GatewaySettings, server: Server, core: Core) -> None:
    core.in_flight.draining = True
    await server.set_serving(False)
    log.info("draining %d requests", core.in_flight.count)
    if not await core.in_flight.drain(settings.drain_s):
        log.warning("drain time is over: %d answers are cut", core.in_flight.count)
        core.relay.cut(Unavailable("this gateway is shutting down; ask again", code="draining", retry_after_s=1))
        await core.in_flight.drain(settings.cut_s)


@asynccontextmanager
async def _until_left(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the block and cancel it when the block is left."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        try:
            yield
        finally:
            task.cancel()
