"""What reading and storing share."""

from dataclasses import dataclass

from gpu_worker.cold.exchange import Exchange
from gpu_worker.cold.known import Known
from gpu_worker.cold.metrics import ColdMetrics
from mesh.clients.cache import Caches
from mesh.kv import KvGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The two ends between which blocks move, what a block is, and which of them the service is believed to hold."""

    caches: Caches
    exchange: Exchange
    geometry: KvGeometry
    known: Known
    metrics: ColdMetrics
