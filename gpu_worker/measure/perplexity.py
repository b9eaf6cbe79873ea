"""How well a model predicts a text, in nats: what a precision costs in quality."""

from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from gpu_worker.engine.config import EngineConfig
from gpu_worker.measure.logits import logits_of


def negative_log_likelihoods(config: EngineConfig, windows: list[list[int]]) -> Iterator[float]:
    """Of each window [T] the sum of -ln p over its T-1 predicted tokens, each given those before it in the window.

    Perplexity is exp(sum of the sums / number of predicted tokens).
    """
    for ids, logits in zip(windows, logits_of(config, windows), strict=True):
        targets = torch.tensor(ids[1:], device=logits.device)  # [T-1]
        yield float(cross_entropy(logits[:-1], targets, reduction="sum"))
