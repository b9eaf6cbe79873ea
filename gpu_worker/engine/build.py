"""From a configuration to an engine that is ready to step. Only what the chosen kind needs is imported."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpu_worker.engine import presets
from gpu_worker.engine.admission import Admission
from gpu_worker.engine.api import Engine, EngineInfo
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.engine.holdings import Holdings
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.preparing import Compiler
from gpu_worker.engine.runner import NO_NUMBERS, Runner
from gpu_worker.engine.schedule import Schedule
from gpu_worker.engine.sequence import blocks_for
from gpu_worker.engine.static_policy import PaddedRunner, StaticPolicy, UnsharedPool
from gpu_worker.engine.swap import HostBuffer
from gpu_worker.engine.transfer import BlockStore
from gpu_worker.engine.vitality import warm_up_plan
from gpu_worker.models.errors import LoadError, PoolTooSmall
from mesh.blocks import BLOCK_TOKENS

if TYPE_CHECKING:
    from gpu_worker.models.checkpoint import Progress

WARM_UP_TOKENS = 4


def build_engine(config: EngineConfig, progress: "Progress") -> Engine:
    """Load the model, size the pool, wire the parts. Raises LoadError, or InvalidRequest if there is no such model."""
    if config.kind == "simulated":
        from gpu_worker.engine.simulated_engine import build_simulated

        return build_simulated(config, progress)
    from gpu_worker.engine.torch_engine import build_torch

    return build_torch(config, progress)


def assemble(
    config: EngineConfig,
    info: EngineInfo,
    runner: Runner,
    store: BlockStore | None = None,
    compiler: Compiler | None = None,
) -> BatchingEngine:
    """The engine around whatever runs its steps; `store` is the content of its blocks, if others can use it, `compiler`
    that of grammars, if the runner follows them.
    """
    block_bytes = store.block_bytes if store is not None else config.simulated_kv_bytes_per_token * BLOCK_TOKENS
    host = HostBuffer(config.swap_bytes, block_bytes, store)
    config = presets.settled(config)
    info = msgspec.structs.replace(info, preset=config.preset, policy=config.policy)
    pace = presets.pace(config)
    admission = Admission(
        config.max_waiting_tokens,
        config.max_waiting_sequences,
        config.expected_growth,
        info.total_blocks,
        config.max_sequences,
        config.kv_promised,
    )
    if config.policy == "static":
        policy = StaticPolicy(Holdings(UnsharedPool(info.total_blocks), host), pace, info.context_tokens)
        return BatchingEngine(info, PaddedRunner(runner, policy), policy, admission, compiler=compiler)
    schedule = Schedule(Holdings(BlockPool(info.total_blocks), host, store), pace, presets.batch_limit(config))
    return BatchingEngine(info, runner, schedule, admission, store, compiler=compiler)


def pool_blocks(config: EngineConfig, folder: Path, block_bytes: int, budget: int, longest: int) -> int:
    """As many blocks as `budget` bytes hold, but no more than all sequences could ever fill. Raises PoolTooSmall."""
    total = min(budget // block_bytes, config.max_sequences * blocks_for(longest))
    if total < 1:
        raise PoolTooSmall(folder, _too_small(config, block_bytes, budget, longest))
    return total


def _too_small(config: EngineConfig, block_bytes: int, budget: int, longest: int) -> str:
    """Which variable made the pool, and the least that would do."""
    least, whole = _size(block_bytes), _size(block_bytes * blocks_for(longest))
    needs = f"this model's KV takes {least} at least (one block of {BLOCK_TOKENS} tokens), {whole} for {longest} tokens"
    if config.kv_bytes:
        return f"SHOAL_WORKER_KV_BYTES is {budget} bytes, too small a KV pool: {needs}"
    share = f"SHOAL_WORKER_KV_SHARE is {config.kv_share:g}, which makes a KV pool of {budget} bytes, too small a one"
    return f"{share}: {needs}; raise it, free memory, or set SHOAL_WORKER_KV_BYTES"


def _size(size: int) -> str:
    """Rounded up, as SHOAL_WORKER_KV_BYTES takes it."""
    unit, name = (1 << 20, "MiB") if size >= 10 << 20 else (1 << 10, "KiB")
    return f"{-(-size // unit)}{name}"


def warm_up(engine: Engine, model: str) -> None:
    """One short greedy answer through the engine itself: proof that it works, and caches filled.

    Raises LoadError if the model's weights lead to no numbers, RuntimeError if a step fails otherwise.
    """
    engine.submit(warm_up_plan(engine.info, WARM_UP_TOKENS))
    while engine.has_work():
        for event in engine.step().events:
            problem = getattr(event, "message", "")
            if problem == NO_NUMBERS:
                raise LoadError(Path(model), "its weights overflow: the first answer's logits are no numbers")
            if problem:
                raise RuntimeError(f"the warm-up failed: {problem}")
