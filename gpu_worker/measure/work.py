"""How many weights a token meets, by a checkpoint's configuration."""

from gpu_worker.models.llama_config import parse_config
from gpu_worker.models.registry import open_checkpoint
from mesh.models import find


def parameters(model: str) -> int:
    """Weights of all matmuls, the output head's among them and the embedding's table not. Raises LoadError."""
    checkpoint = open_checkpoint(find(model).path)
    of = parse_config(checkpoint.config, checkpoint.source)
    attention = of.hidden * of.head_dim * 2 * (of.heads + of.kv_heads)
    return of.layers * (attention + 3 * of.hidden * of.feed_forward) + of.hidden * of.vocab
