"""Where the engine stands after a step, told from its parts."""

from collections.abc import Mapping

from gpu_worker.engine.admission import waiting_tokens
from gpu_worker.engine.api import EngineLoad, KvUse
from gpu_worker.engine.meters import Meters
from gpu_worker.engine.policy import Policy
from gpu_worker.engine.sequence import Request, blocks_for
from mesh.blocks import BLOCK_TOKENS


def load_of(schedule: Policy, meters: Meters, requests: Mapping[str, Request]) -> EngineLoad:
    """The load report. `requests` is all that runs or waits, by request id."""
    running, waiting, pool = schedule.running, schedule.waiting, schedule.pool
    growth = sum([blocks_for(one.limit) - len(one.blocks) for one in running])  # lists: this runs in every step
    unfinished = [left for one in running if (left := one.uncomputed) > 1]
    return EngineLoad(
        steps=meters.steps,
        waiting_sequences=len(waiting),
        running_sequences=len(running),
        queued_prefill_tokens=waiting_tokens(waiting) + sum(unfinished),
        prefilling_sequences=len(waiting) + len(unfinished),
        free_blocks=pool.free,
        cached_blocks=pool.cached,
        used_blocks=pool.used,
        committed_blocks=pool.used + growth,
        total_blocks=pool.total,
        prefill_tokens_per_s=meters.prefill_tokens_per_s,
        decode_tokens_per_s=meters.decode_tokens_per_s,
        median_step_ms=meters.median_step_ms,
        preemptions=schedule.preemptions,
        batch_limit=schedule.limits.sequences,
        prompt_budget_tokens=schedule.limits.prompt_tokens,
        prompt_budget_ms=schedule.limits.prompt_ms,
        kv=_kv_use(schedule),
        running=[request.identity for request in requests.values()],
        computed={key: max([one.computed for one in r.sequences]) for key, r in requests.items()},
    )


def _kv_use(schedule: Policy) -> KvUse:
    holdings = schedule.holdings
    counts, host = holdings.counts, holdings.host
    slots = schedule.pool.used * BLOCK_TOKENS
    return KvUse(
        unwritten_ratio=holdings.unwritten(schedule.running) / slots if slots else 0.0,
        host_bytes=host.used * host.block_bytes,
        partial_hits=counts.partial_hits,
        copied_blocks=counts.copied_blocks,
        recomputed_sequences=schedule.preemptions - counts.swapped_sequences,
        swapped_sequences=counts.swapped_sequences,
        swapped_out_bytes=counts.swapped_out_blocks * host.block_bytes,
        swapped_in_bytes=counts.swapped_in_blocks * host.block_bytes,
    )
