"""What a worker tells schedulers about itself, as plain data, and its translation to WorkerReport."""

from dataclasses import dataclass

from shoal.scheduler.v1 import scheduler_pb2
from shoal.types.v1 import types_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker's Hello: what it is. Fixed for the life of its process; digests are the contract's."""

    worker_id: str
    address: str  # host:port of its WorkerService
    model: str
    pool: str
    model_digest: bytes
    tokenizer_digest: bytes
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    context_tokens: int
    total_blocks: int
    max_sequences: int
    precision: str
    version: str
    block_format_version: int
    features: tuple[str, ...]
    fault_domain: str = ""
    adapter: str = ""
    adapter_digest: bytes = b""
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """A worker's load at one instant, as Load has it; what differs by scheduler (seq, blocks) is added on the way."""

    running: frozenset[tuple[str, int]]  # (request_id, attempt) of all that runs or waits
    draining: bool
    healthy: bool
    waiting_sequences: int = 0
    running_sequences: int = 0
    queued_prefill_tokens: int = 0
    prefilling_sequences: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    committed_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    median_step_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """What one Load says of the device's prefix cache: a change, or a piece of the list of everything."""

    stored: list[bytes]
    evicted: list[bytes]
    snapshot: bool = False
    more: bool = False


_SAME_IN_HELLO = (
    "worker_id", "address", "model", "pool", "model_digest", "tokenizer_digest", "context_tokens", "total_blocks",
    "max_sequences", "precision", "version", "block_format_version", "features", "fault_domain", "adapter",
    "adapter_digest", "simulated",
)  # fmt: skip
_SAME_IN_LOAD = (
    "draining", "healthy", "waiting_sequences", "running_sequences", "queued_prefill_tokens", "prefilling_sequences",
    "free_blocks", "cached_blocks", "used_blocks", "committed_blocks", "prefill_tokens_per_s", "decode_tokens_per_s",
    "median_step_ms",
)  # fmt: skip


def hello_of(facts: WorkerFacts) -> scheduler_pb2.WorkerReport:
    """The first report of an Attach."""
    geometry = scheduler_pb2.Geometry(
        block_tokens=facts.block_tokens,
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        kv_dtype=facts.kv_dtype,
    )
    same = {name: getattr(facts, name) for name in _SAME_IN_HELLO}
    return scheduler_pb2.WorkerReport(hello=scheduler_pb2.Hello(geometry=geometry, **same))


def load_of(state: LoadState, seq: int, epoch: int, change: BlockChange) -> scheduler_pb2.WorkerReport:
    """A later report. Without a change of blocks it carries none."""
    load = scheduler_pb2.Load(
        seq=seq,
        attach_epoch=epoch,
        running=[scheduler_pb2.Running(request_id=id_, attempt=attempt) for id_, attempt in sorted(state.running)],
        snapshot=change.snapshot,
        snapshot_more=change.more,
        **{name: getattr(state, name) for name in _SAME_IN_LOAD},
    )
    if change.stored or change.evicted or change.snapshot:
        load.blocks.add(tier=types_pb2.KV_TIER_DEVICE, stored=b"".join(change.stored), evicted=b"".join(change.evicted))
    return scheduler_pb2.WorkerReport(load=load)
