"""Protobuf to plain dataclasses and back. Decides nothing; raises InvalidRequest where a message means nothing."""

from mesh.blocks import BLOCK_TOKENS, FORMAT_VERSION, KEY_BYTES
from mesh.errors import InvalidRequest, Mismatch
from scheduler.bounds import (
    check_address,
    check_attempt,
    check_choices,
    check_name,
    check_rate,
    check_text,
    uint32,
    waited_s,
)
from scheduler.demand import Demand, Pins, Priority
from scheduler.effects import Granted, Voted
from scheduler.leases import Adopt, Event, Failed, FailureKind, Finished, Open, Parked, Refused, RefusedCause
from scheduler.lines import QueueStat
from scheduler.placement import Candidate
from scheduler.prefixes import Tier
from scheduler.reports import BlockChange, Hello, Load
from shoal.scheduler.v1 import scheduler_pb2 as pb
from shoal.types.v1 import types_pb2 as types

DEFAULT_POOL = "default"
_PRIORITIES = {types.PRIORITY_HIGH: Priority.HIGH, types.PRIORITY_BATCH: Priority.BATCH}
_TIERS = {types.KV_TIER_DEVICE: Tier.DEVICE, types.KV_TIER_HOST: Tier.HOST, types.KV_TIER_DISK: Tier.DISK}
_TIERS_BACK = {tier: number for number, tier in _TIERS.items()}


def _keys(packed: bytes, field: str) -> tuple[bytes, ...]:
    """Chain keys out of their concatenation."""
    if len(packed) % KEY_BYTES:
        raise InvalidRequest(f"{field}: {len(packed)} bytes are no whole keys of {KEY_BYTES}", field=field)
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))


def _demand_of(demand: pb.Demand, event: str) -> Demand:
    meta = demand.meta
    for name, value in (("meta.request_id", meta.request_id), ("meta.model", meta.model)):
        if not value:
            raise InvalidRequest(f"{name} is empty", field=f"{event}.demand.{name}")
    for name in ("request_id", "tenant", "model"):
        check_text(getattr(meta, name), f"{event}.demand.meta.{name}")
    for name in ("session_id", "pool"):
        check_text(getattr(demand, name), f"{event}.demand.{name}")
    if not demand.prompt_tokens:
        raise InvalidRequest("a prompt has at least one token", field=f"{event}.demand.prompt_tokens")
    check_choices(demand.choices, f"{event}.demand.choices")
    most = max(demand.max_tokens, 1)
    return Demand(
        request_id=meta.request_id,
        tenant=meta.tenant,
        pins=Pins(
            model=meta.model,
            pool=demand.pool or DEFAULT_POOL,
            adapter=demand.adapter,
            tokenizer_digest=demand.tokenizer_digest,
            model_digest=demand.model_digest,
            precision=demand.precision,
            features=frozenset(demand.required_features),
        ),
        prompt_tokens=demand.prompt_tokens,
        max_tokens=most,
        expected_tokens=min(demand.expected_tokens or most, most),
        priority=_PRIORITIES.get(meta.priority, Priority.NORMAL),
        choices=demand.choices,
        block_keys=_keys(demand.block_keys, f"{event}.demand.block_keys"),
        session_id=demand.session_id,
    )


def event_of(message: pb.LeaseEvent) -> Event | None:
    """A lease's event; None for one that only a newer neighbour knows."""
    match message.WhichOneof("event"):
        case "open":
            opening = message.open
            check_attempt(opening.last_attempt, "open.last_attempt")
            return Open(
                _demand_of(opening.demand, "open"),
                waited_s(opening.waited_ms),
                opening.emitted_tokens,
                frozenset(opening.avoid),
                opening.last_attempt,
            )
        case "adopt":
            return _adopt_of(message.adopt)
        case "refused":
            refused = message.refused
            return Refused(refused.worker_id, refused.attempt, RefusedCause(refused.cause))
        case "failed":
            failed = message.failed
            return Failed(
                failed.worker_id, failed.attempt, FailureKind(failed.kind), failed.emitted_tokens, failed.reason
            )
        case "parked":
            parked = message.parked
            keys = _keys(parked.more_block_keys, "parked.more_block_keys")
            return Parked(parked.worker_id, parked.attempt, parked.emitted_tokens, keys)
        case "finished":
            finished = message.finished
            return Finished(finished.attempt, finished.outcome == pb.OUTCOME_COMPLETED)
        case _:
            return None


def _adopt_of(adopt: pb.Adopt) -> Adopt:
    for name, value in (("worker.worker_id", adopt.worker.worker_id), ("attempt", adopt.attempt)):
        if not value:
            raise InvalidRequest(f"adopt: {name} is not set", field=f"adopt.{name}")
    check_attempt(adopt.attempt, "adopt.attempt")
    return Adopt(
        _demand_of(adopt.demand, "adopt"),
        adopt.worker.worker_id,
        adopt.worker.address,
        adopt.attempt,
        waited_s(adopt.waited_ms),
        adopt.emitted_tokens,
        frozenset(adopt.avoid),
    )


def grant_of(granted: Granted, scheduler_id: str) -> pb.Grant:
    """A Grant message."""
    return pb.Grant(
        worker=pb.WorkerRef(worker_id=granted.worker_id, address=granted.address),
        attempt=granted.attempt,
        waited_ms=uint32(granted.waited_s * 1_000),
        queue_class=granted.queue_class,
        ahead=uint32(granted.ahead),
        candidates=[_candidate_of(candidate) for candidate in granted.candidates],
        reason=granted.reason,
        scheduler_id=scheduler_id,
        adopted=granted.adopted,
    )


def _candidate_of(candidate: Candidate) -> pb.Candidate:
    cached = [
        types.CachedTokens(tier=_TIERS_BACK[tier], tokens=tokens)
        for tier, tokens in zip(Tier, candidate.cached_tokens, strict=False)
        if tokens
    ]
    return pb.Candidate(worker_id=candidate.worker_id, expected_ms=candidate.expected_ms, cached=cached)


def hello_of(hello: pb.Hello) -> Hello:
    """A worker's Hello. Raises Mismatch if its blocks are not the mesh's."""
    _check_hello(hello)
    if hello.geometry.block_tokens != BLOCK_TOKENS:
        raise Mismatch(f"blocks hold {BLOCK_TOKENS} tokens in this mesh, not {hello.geometry.block_tokens}")
    return Hello(
        worker_id=hello.worker_id,
        address=hello.address,
        pins=Pins(
            model=hello.model,
            pool=hello.pool or DEFAULT_POOL,
            adapter=hello.adapter,
            tokenizer_digest=hello.tokenizer_digest,
            model_digest=hello.model_digest,
            precision=hello.precision,
            features=frozenset(hello.features),
        ),
        context_tokens=hello.context_tokens,
        total_blocks=hello.total_blocks,
        max_sequences=hello.max_sequences,
        fault_domain=hello.fault_domain,
        same_block_format=hello.block_format_version == FORMAT_VERSION,
    )


def _check_hello(hello: pb.Hello) -> None:
    for name in ("worker_id", "address", "model", "context_tokens", "total_blocks", "max_sequences"):
        if not getattr(hello, name):
            raise InvalidRequest(f"hello.{name} is not set", field=f"hello.{name}")
    for name in ("block_tokens", "layers", "kv_heads", "head_dim"):
        if not getattr(hello.geometry, name):
            raise InvalidRequest(f"hello.geometry.{name} is not set", field=f"hello.geometry.{name}")
    for name in ("worker_id", "model", "pool", "adapter", "fault_domain", "version"):
        check_name(getattr(hello, name), f"hello.{name}")
    check_address(hello.address, "hello.address")


def load_of(load: pb.Load) -> Load:
    """A worker's Load. Block events of the shared tier are not a worker's and are left out.

    Raises InvalidRequest, naming the field, for a rate that is no number: placement would compare others with it.
    """
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "median_step_ms"):
        check_rate(getattr(load, name), f"load.{name}")
    for rate in load.tier_rates:
        check_rate(rate.tokens_per_s, "load.tier_rates.tokens_per_s")
    changes = [
        BlockChange(_TIERS[b.tier], _keys(b.stored, "load.blocks.stored"), _keys(b.evicted, "load.blocks.evicted"))
        for b in load.blocks
        if b.tier in _TIERS
    ]
    return Load(
        seq=load.seq,
        running=frozenset((running.request_id, running.attempt) for running in load.running),
        sequences=load.waiting_sequences + load.running_sequences,
        queued_prefill_tokens=load.queued_prefill_tokens,
        prefilling_sequences=load.prefilling_sequences,
        committed_blocks=max(load.committed_blocks, load.used_blocks),
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        median_step_ms=load.median_step_ms,
        blocks=tuple(changes),
        snapshot=load.snapshot,
        snapshot_more=load.snapshot_more,
        draining=load.draining,
        healthy=load.healthy,
        refuses=load.pressure == pb.PRESSURE_REFUSE,
        tier_tokens_per_s={_TIERS[r.tier]: r.tokens_per_s for r in load.tier_rates if r.tier in _TIERS},
        attach_epoch=load.attach_epoch,
    )


def without_lists(load: pb.Load) -> pb.Load:
    """The load as gateways see it: without block events and running ids."""
    seen = pb.Load()
    seen.CopyFrom(load)
    seen.ClearField("running")
    seen.ClearField("blocks")
    return seen


def unclaimed_of(voted: Voted) -> pb.WorkerOrder:
    """An Unclaimed order."""
    attempts = [pb.Running(request_id=request_id, attempt=attempt) for request_id, attempt in sorted(voted.attempts)]
    return pb.WorkerOrder(unclaimed=pb.Unclaimed(attach_epoch=voted.attach_epoch, attempts=attempts))


def queue_state_of(stat: QueueStat) -> pb.QueueState:
    """One class of one line, as gateways see it."""
    return pb.QueueState(
        queue_class=stat.queue_class,
        waiting=uint32(stat.waiting),
        oldest_ms=uint32(stat.oldest_s * 1_000),
        model=stat.model,
        pool=stat.pool,
        cost=stat.cost,
    )
