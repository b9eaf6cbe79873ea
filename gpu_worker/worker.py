"""One worker process's life: start the engine, answer, attach, serve; then drain, or end because the engine did."""

import asyncio
import logging
import time

from gpu_worker.bridge import Bridge, Listeners, engine_process
from gpu_worker.cold.tier import ColdTier
from gpu_worker.engine.api import StepResult
from gpu_worker.health import Watch
from gpu_worker.identity import Identity
from gpu_worker.loading import LoadingLine
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.pulse import Pulse
from gpu_worker.service import WorkerService
from gpu_worker.settings import WorkerSettings, machine
from mesh.callers import only_from
from mesh.clients.attach import Attached, Attacher
from mesh.clients.board import Board
from mesh.clients.reports import LoadState
from mesh.process import ProcessFailed, tls_of
from mesh.server import InFlight, Server
from mesh.settings import UNUSABLE_SETTINGS
from mesh.telemetry import Telemetry
from mesh.tls import GATEWAY, OPERATOR

# After the engine is lost: seconds for the streams' last word to leave.
LAST_WORDS_S = 1.0
# After a drain: most seconds of what drain_s has left for KV that only this worker has.
FLUSH_S = 2.0
CALLERS = (GATEWAY, OPERATOR)

log = logging.getLogger("shoal.worker")


class EngineLost(ProcessFailed):
    """The engine process ended, hung, or never became ready. The message says why."""


class ModelUnusable(EngineLost):
    """It never became ready because of the model that SHOAL_WORKER_MODEL names, or of a setting that leaves no room
    for that. Starting it again does not help.
    """

    code = UNUSABLE_SETTINGS


class Worker:
    """The parts of one process, put together. Use `serve` once."""

    def __init__(self, settings: WorkerSettings, telemetry: Telemetry, worker_id: str, version: str) -> None:
        self.port = 0
        self.listening = asyncio.Event()
        self.bridge: Bridge | None = None
        self._settings = settings
        self._tls = tls_of(settings)
        self._telemetry = telemetry
        self._worker_id = worker_id
        self._version = version
        self._metrics = WorkerMetrics(telemetry.registry)
        self._board = Board()
        self._cold = ColdTier(settings.cold(), self._metrics.cold, self._tls)
        self._in_flight = InFlight()

    async def serve(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set and what ran has ended or been parked. Raises EngineLost."""
        pulse = Pulse(self._settings.overdue_s)
        line = LoadingLine()
        listeners = Listeners(line.show, self._stepped, self._cached)
        interval_s = self._settings.stream_interval_s()
        async with engine_process(self._settings.engine(), pulse, listeners, interval_s) as bridge:
            self.bridge = bridge
            why_lost = await self._serve(bridge, stopping)
        line.end()
        if why_lost and bridge.unusable:
            blamed = f"{self._settings.variable('model')} cannot be served: " if bridge.unusable == "model" else ""
            raise ModelUnusable(f"{blamed}{why_lost}")
        if why_lost:
            raise EngineLost(f"the engine is lost: {why_lost}")

    async def _serve(self, bridge: Bridge, stopping: asyncio.Event) -> str:
        """Returns why the engine was lost; empty after a drain."""
        service = WorkerService(bridge, self._cold, self._in_flight, self._metrics)
        interceptors = [
            *self._telemetry.server_interceptors(),
            *only_from(CALLERS, self._tls, self._telemetry.registry),
        ]
        server = Server(service.registration(), interceptors, self._in_flight)
        self.port = await server.start(self._settings.host, self._settings.port, self._tls)
        ports = {"grpc_port": self.port, "metrics_port": self._telemetry.serve_metrics()}
        self.listening.set()
        log.info("listening", extra={"fields": {"event": "listening", **ports}})
        async with asyncio.TaskGroup() as tasks:
            live = tasks.create_task(self._go_live(bridge, server, service))
            cold = tasks.create_task(self._cold.run(bridge))
            ends = [tasks.create_task(event.wait()) for event in (stopping, bridge.lost)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopped = time.monotonic()
            if not bridge.lost.is_set():
                await self._drain(bridge, server)
            lost = bridge.lost.is_set()
            await server.drain(LAST_WORDS_S if lost else min(self._settings.park_s, self._settings.drain_s))
            if not lost:
                await self._cold.flush(min(FLUSH_S, self._settings.drain_s - (time.monotonic() - stopped)))
            for task in (live, cold, *ends):
                task.cancel()
        return bridge.why_lost if lost else ""

    async def _go_live(self, bridge: Bridge, server: Server, service: WorkerService) -> None:
        """Once the engine is ready: take requests, tell health the truth, stay attached. Until cancelled."""
        info = await bridge.ready()
        if info is None:
            return
        identity = service.identity = Identity(self._worker_id, info)
        self._metrics.loaded(info)
        if info.simulated:
            log.warning("the engine is SIMULATED: it computes nothing", extra={"fields": {"event": "simulated"}})
        if info.policy == "static":
            log.warning("the policy is STATIC: a baseline to measure against", extra={"fields": {"event": "static"}})

        async def tell(well: bool) -> None:
            await server.set_serving(well)
            self._metrics.up(well)
            self._board.touch()
            log.info("ready" if well else "not ready", extra={"fields": {"event": "ready" if well else "not_ready"}})

        facts = identity.facts(
            address=self._settings.advertised(self.port),
            pool=self._settings.pool,
            fault_domain=self._settings.fault_domain or machine(),
            version=self._version,
        )
        attached = Attached(facts, self._board, lambda: self._load(bridge), bridge.park)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Watch(bridge, tell, self._settings.hang_exit_s).run())
            tasks.create_task(Attacher(attached, self._settings.schedulers, self._tls).run())

    async def _drain(self, bridge: Bridge, server: Server) -> None:
        """Take nothing new; let what runs end while there is time, then park it, to go on elsewhere."""
        self._in_flight.draining = True
        await server.set_serving(False)
        self._board.touch()
        log.info("draining", extra={"fields": {"event": "draining", "running": self._in_flight.count}})
        began = time.monotonic()
        if not await self._in_flight.drain(max(0.0, self._settings.drain_s - self._settings.park_s)):
            bridge.park_all("the worker is shutting down")
        log.info("drained in %.1f s", time.monotonic() - began)

    def _stepped(self, result: StepResult) -> None:
        self._metrics.stepped(result)
        self._board.note(result.blocks_stored, result.blocks_evicted)
        self._cold.stepped(result)

    def _cached(self, keys: list[bytes]) -> None:
        self._board.replace(keys)
        self._cold.cached(keys)

    def _load(self, bridge: Bridge) -> LoadState:
        running, draining, healthy = bridge.running(), self._in_flight.draining, bridge.well()
        if (load := bridge.load) is None:
            total = bridge.info.total_blocks if bridge.info is not None else 0
            return LoadState(running=running, draining=draining, healthy=healthy, free_blocks=total)
        return LoadState(
            running=running,
            draining=draining,
            healthy=healthy,
            waiting_sequences=load.waiting_sequences,
            running_sequences=load.running_sequences,
            queued_prefill_tokens=load.queued_prefill_tokens,
            prefilling_sequences=load.prefilling_sequences,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            used_blocks=load.used_blocks,
            committed_blocks=load.committed_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            median_step_ms=load.median_step_ms,
        )
