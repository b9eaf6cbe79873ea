"""The shared tier as one worker uses it: reading before a prompt is computed, storing what is seen again.

Off, it costs nothing. Everything here runs beside the engine. No request waits for it longer than policy.py allows,
and nothing that goes wrong out there is an error of a request.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_worker.bridge import Bridge
from gpu_worker.cold.device import Device
from gpu_worker.cold.exchange import Exchange
from gpu_worker.cold.known import Known
from gpu_worker.cold.link import Link
from gpu_worker.cold.metrics import ColdMetrics
from gpu_worker.cold.policy import ColdLimits
from gpu_worker.cold.reader import Lookup, Reader
from gpu_worker.cold.sightings import Sightings
from gpu_worker.cold.writer import Writer
from gpu_worker.engine.api import EngineInfo, Plan, StepResult
from mesh.blocks import BLOCK_TOKENS, chain_keys, namespace
from mesh.clients.cache import CacheBudgets, Caches
from mesh.kv import KvGeometry
from mesh.tls import Tls

# The longest that one Get may take, the engine's own time included.
CALL_S = 60.0
# Ids whose keys are made on the event loop, in a millisecond or two.
AT_ONCE_IDS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSettings:
    """`caches` (host:port, comma-separated) empty = no shared tier."""

    caches: str
    limits: ColdLimits
    bytes_in_flight: int  # on their way from the service to the engine
    store_after: int  # sights of a block
    queue_blocks: int  # waiting to be stored


Submit = Callable[[Lookup], None]


class ColdTier:
    """Run `run` while the engine is there."""

    def __init__(self, settings: ColdSettings, metrics: ColdMetrics, tls: Tls | None = None) -> None:
        self._settings = settings
        self._tls = tls
        self._metrics = metrics
        self._device = Device()
        self._info: EngineInfo | None = None
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, bridge: Bridge) -> None:
        """From when the engine is ready until cancelled. A simulated engine's KV is nobody's: it takes no part."""
        info = await bridge.ready()
        if info is None or info.simulated or not self._settings.caches:
            return
        link, settings = self._link(bridge, info), self._settings
        reader = Reader(link, self._device, settings.limits, settings.bytes_in_flight)
        writer = Writer(link, self._device, Sightings(settings.store_after), settings.queue_blocks)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._info, self._reader, self._writer = info, reader, writer
                for part in (link.caches, link.exchange, writer):
                    self._tasks.create_task(part.run())
        finally:
            self._reader = self._writer = None

    def _link(self, bridge: Bridge, info: EngineInfo) -> Link:
        limits = self._settings.limits
        budgets = CacheBudgets(match_s=limits.match_s, stall_s=limits.stall_s, fetch_s=CALL_S)
        return Link(
            caches=Caches(self._settings.caches, self._metrics.called, budgets, tls=self._tls),
            exchange=Exchange(bridge.blocks),
            geometry=KvGeometry(info.kv_dtype, info.block_tokens, info.layers, info.kv_heads, info.head_dim),
            known=Known(),
            metrics=self._metrics,
        )

    def cached(self, keys: list[bytes]) -> None:
        """The engine's prefix cache holds exactly `keys`."""
        self._device.holds(keys)

    def stepped(self, result: StepResult) -> None:
        """A step changed the prefix cache."""
        self._device.stepped(result)
        if self._writer is not None:
            self._writer.note(result.blocks_computed)
            self._writer.move(result.blocks_parked)

    async def flush(self, within_s: float) -> None:
        """Before the engine goes: store what is here, if there is time."""
        if self._writer is not None:
            await self._writer.flush(within_s)

    @contextmanager
    def fetching(self, plan: Plan, submit: Submit) -> Iterator[Lookup]:
        """Call `submit` once what can be fetched for `plan` was: at once if nothing is, never after the block."""
        lookup = Lookup()
        if self._tasks is None or self._reader is None or self._info is None or _blocks(plan) == 0:
            submit(lookup)
            yield lookup
            return
        task = self._tasks.create_task(self._fetch(self._reader, self._info, plan, lookup, submit))
        try:
            yield lookup
        finally:
            task.cancel()

    async def _fetch(self, reader: Reader, info: EngineInfo, plan: Plan, lookup: Lookup, submit: Submit) -> None:
        root = namespace(info.model_digest, info.tokenizer_digest, plan.adapter, plan.cache_salt)
        ids = _findable_ids(plan)
        keys = chain_keys(root, ids) if len(ids) <= AT_ONCE_IDS else await asyncio.to_thread(chain_keys, root, ids)
        if self._writer is not None:
            self._writer.found(root, keys[: self._device.leading(keys)])
        if reader.lacks(keys):
            await reader.bring(root, keys, lookup)
        submit(lookup)


def _findable_ids(plan: Plan) -> list[int]:
    """What the engine will look up: at least the last known token is computed, for its logits."""
    if len(plan.choices) == 1:
        return (plan.prompt_ids + plan.choices[0].emitted_ids)[:-1]
    return plan.prompt_ids[:-1]


def _blocks(plan: Plan) -> int:
    return len(_findable_ids(plan)) // BLOCK_TOKENS
