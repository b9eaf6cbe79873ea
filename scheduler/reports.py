"""What workers say, as plain data: Hello once, then Load after Load. Field meanings: scheduler.proto."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from scheduler.demand import Pins
from scheduler.prefixes import Tier


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a worker is. Fixed while its stream lives."""

    worker_id: str
    address: str
    pins: Pins
    context_tokens: int
    total_blocks: int
    max_sequences: int
    fault_domain: str = ""
    # Whether its chain keys mean what ours mean.
    same_block_format: bool = True


@dataclass(frozen=True, slots=True)
class BlockChange:
    """What one tier's cache gained and lost."""

    tier: Tier
    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Where a worker stands at one instant."""

    seq: int
    running: frozenset[tuple[str, int]] = frozenset()
    sequences: int = 0
    queued_prefill_tokens: int = 0
    prefilling_sequences: int = 0  # 0 beside queued tokens = the worker does not say
    committed_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    median_step_ms: float = 0.0
    blocks: tuple[BlockChange, ...] = ()
    snapshot: bool = False
    snapshot_more: bool = False
    draining: bool = False
    healthy: bool = True
    # Pressure at which a worker takes nothing new.
    refuses: bool = False
    tier_tokens_per_s: Mapping[Tier, float] = field(default_factory=lambda: MappingProxyType({}))
    attach_epoch: int = 0
