"""The engine that computes: weights onto a device, KV in its memory, whatever does the arithmetic (backend.py)."""

import os
from pathlib import Path

import msgspec
import torch

from gpu_worker.engine.api import EngineInfo
from gpu_worker.engine.backend import backend_of
from gpu_worker.engine.build import assemble, pool_blocks
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.engine.grammar_compiler import GrammarCompiler
from gpu_worker.engine.presets import settled
from gpu_worker.models.checkpoint import Progress
from gpu_worker.models.errors import LoadError
from gpu_worker.models.registry import LoadedModel, load
from mesh.blocks import BLOCK_TOKENS
from mesh.models import ModelFolder, find


def build_torch(config: EngineConfig, progress: Progress) -> BatchingEngine:
    """Raises LoadError, or InvalidRequest if there is no such model."""
    if config.device == "auto":
        config = msgspec.structs.replace(config, device="cuda" if torch.cuda.is_available() else "cpu")
    if config.threads or config.device == "cpu":
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
    folder = find(config.model)
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError(folder.path, f"device {config.device!r} was asked for, but torch finds no CUDA device")
    model = load(folder, device, config.precision, progress, config.kernels, config.kv_precision)
    progress(0.95, "making the KV pool")
    return around(config, folder, model)


def around(config: EngineConfig, folder: ModelFolder, model: LoadedModel) -> BatchingEngine:
    """An engine around a loaded model."""
    config = settled(config)
    decoder, backend = model.decoder, backend_of(model, config)
    longest = min(decoder.context_tokens, config.context_tokens or decoder.context_tokens)
    budget = config.kv_bytes or int(config.kv_share * free_memory(torch.device(config.device)))
    total = pool_blocks(config, folder.path, backend.block_bytes, budget, longest)
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
        kv_dtype=backend.kv_dtype,
        precision=model.precision,
        total_blocks=total,
        max_sequences=config.max_sequences,
        device=config.device,
    )
    runner, store = backend.start(total)
    compiler = GrammarCompiler(folder.tokenizer, info.vocab_size, info.eos_token_ids)
    return assemble(config, info, runner, store, compiler)


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
