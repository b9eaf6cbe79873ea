"""Logits of given tokens at every position: what perplexity needs and an engine, which samples, never gives.

A sequence is one prompt piece over blocks of its own, so the arithmetic is the engine's at that precision.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch

from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.sequence import blocks_for
from gpu_worker.kernels.program import step_of
from gpu_worker.models.native_llama import NativeLlama
from gpu_worker.models.paged import Batch, PagedKv, PrefillPiece
from gpu_worker.models.registry import PRECISIONS, Decoder, LoadedModel, load
from mesh.blocks import BLOCK_TOKENS
from mesh.models import find


def logits_of(config: EngineConfig, ids: list[list[int]]) -> Iterator[torch.Tensor]:
    """fp32 logits [T, V] of each of `ids` [T], row t of what follows ids[t], in `config.precision`.

    Raises LoadError, or InvalidRequest if there is no such model.
    """
    name = config.device
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
    folder, kernels = find(config.model), config.kernels
    model = load(folder, device, config.precision, lambda fraction, what: None, kernels, config.kv_precision)
    for sequence in ids:
        yield model_logits(model, sequence, device)


def model_logits(model: LoadedModel, ids: list[int], device: torch.device) -> torch.Tensor:
    """fp32 logits [T, V] of ids [T] by a model that is loaded."""
    if isinstance(model.decoder, NativeLlama):
        return _native_logits(model.decoder, ids)
    dtype = PRECISIONS[model.precision]
    assert dtype is not None  # else it could not have been loaded
    return _torch_logits(model.decoder, ids, device, dtype)


def _native_logits(model: NativeLlama, ids: list[int]) -> torch.Tensor:
    """One step in which every token is a piece of its own, for only a piece's last token gives logits.

    On one thread, which takes them in order: a piece's last token voids the rest of its block, where the next ones go.
    """
    blocks = list(range(blocks_for(len(ids))))
    compiled = model.program(model.kv(len(blocks)), 1, len(ids), len(ids))
    compiled.program.run(step_of([(position, [token], blocks, True) for position, token in enumerate(ids)]))
    return torch.from_numpy(compiled.logits).clone()


@torch.inference_mode()
def _torch_logits(decoder: Decoder, ids: list[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    kv = PagedKv(decoder.kv_shape, blocks_for(len(ids)), device, dtype)
    kv.clear(list(range(blocks_for(len(ids)))))
    return decoder.forward(_whole(ids, decoder.kv_shape.query_group, device, dtype), kv)


def _whole(ids: list[int], query_group: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """One sequence as a step of one piece, in blocks 0, 1, 2 …, logits of every row."""
    count = len(ids)
    rows = torch.arange(count, device=device)  # [T]
    hidden = np.arange(count) > np.arange(count)[:, None]  # [T, T]
    mask = torch.zeros((count * query_group, count), dtype=dtype)
    mask.masked_fill_(torch.from_numpy(np.repeat(hidden, query_group, axis=0)), -torch.inf)
    table = torch.arange(blocks_for(count), device=device)[None]  # [1, blocks]
    return Batch(
        token_ids=torch.tensor(ids, device=device),
        positions=rows,
        blocks=rows // BLOCK_TOKENS,
        offsets=rows % BLOCK_TOKENS,
        logit_rows=rows,
        decodes=[],
        prefills=[PrefillPiece(0, count, count, table, mask.to(device))],
    )
