"""From a configuration to an engine that is ready to step."""

import os
from pathlib import Path

import msgspec
import torch

from gpu_worker.engine.admission import Admission
from gpu_worker.engine.api import Engine, EngineInfo
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.engine import TorchEngine
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.pacing import Pace
from gpu_worker.engine.runner import Runner
from gpu_worker.engine.schedule import Schedule
from gpu_worker.engine.sequence import blocks_for
from gpu_worker.engine.vitality import warm_up_plan
from gpu_worker.models.checkpoint import Progress
from gpu_worker.models.errors import LoadError
from gpu_worker.models.paged import PagedKv
from gpu_worker.models.registry import PRECISIONS, LoadedModel, load
from mesh.blocks import BLOCK_TOKENS
from mesh.models import ModelFolder, find

WARM_UP_TOKENS = 4


def build_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Load the model, size the pool, wire the parts. Raises LoadError, or InvalidRequest if there is no such model."""
    if config.device == "auto":
        config = msgspec.structs.replace(config, device="cuda" if torch.cuda.is_available() else "cpu")
    if config.threads or config.device == "cpu":
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
    folder = find(config.model)
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError(folder.path, f"device {config.device!r} was asked for, but torch finds no CUDA device")
    model = load(folder, device, config.precision, progress)
    progress(0.95, "making the KV pool")
    return assemble(config, folder, model)


def assemble(config: EngineConfig, folder: ModelFolder, model: LoadedModel) -> TorchEngine:
    """An engine around a loaded model."""
    decoder, dtype, device = model.decoder, PRECISIONS[config.precision], torch.device(config.device)
    longest = min(decoder.context_tokens, config.context_tokens or decoder.context_tokens)
    total = _pool_blocks(config, decoder.kv_shape.block_bytes(dtype), longest, device)
    if total < 1:
        raise LoadError(folder.path, "the KV pool would hold not even one block; give it more memory")
    info = EngineInfo(
        model=folder.name,
        architecture=model.architecture,
        model_digest=model.digest,
        tokenizer_digest=folder.tokenizer_digest(),
        vocab_size=decoder.vocab_size,
        context_tokens=min(longest, total * BLOCK_TOKENS),
        eos_token_ids=list(model.eos_token_ids),
        block_tokens=BLOCK_TOKENS,
        layers=decoder.kv_shape.layers,
        kv_heads=decoder.kv_shape.kv_heads,
        head_dim=decoder.kv_shape.head_dim,
        kv_dtype=config.precision,
        precision=config.precision,
        total_blocks=total,
        max_sequences=config.max_sequences,
        device=config.device,
    )
    runner = Runner(decoder, PagedKv(decoder.kv_shape, total, device, dtype), device, dtype)
    schedule = Schedule(BlockPool(total), config.max_sequences)
    pace = Pace(config.prefill_chunk, config.prefill_step_ms / 1000)
    admission = Admission(
        config.max_waiting_tokens,
        config.max_waiting_sequences,
        config.expected_growth,
        total,
        config.max_sequences,
        config.kv_promised,
    )
    return TorchEngine(info, runner, schedule, admission, pace)


def warm_up(engine: Engine) -> None:
    """One short greedy answer through the engine itself: proof that it works, and caches filled."""
    engine.submit(warm_up_plan(engine.info, WARM_UP_TOKENS))
    while engine.has_work():
        for event in engine.step().events:
            if getattr(event, "message", ""):
                raise RuntimeError(f"the warm-up failed: {event}")


def _pool_blocks(config: EngineConfig, block_bytes: int, longest: int, device: torch.device) -> int:
    """As many blocks as the memory allowed holds, but no more than all sequences could ever fill."""
    budget = config.kv_bytes or int(config.kv_share * free_memory(device))
    return min(budget // block_bytes, config.max_sequences * blocks_for(longest))


def free_memory(device: torch.device) -> int:
    """Bytes that an allocation on the device may take now; on a CPU within the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines.get("MemAvailable", f"{free // 1024} kB").split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return free if text == "max" else min(free, int(text))
