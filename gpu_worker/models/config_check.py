"""Whether a configuration's fields can be what they claim: their types and ranges, before anything is built on them.

What they must be to each other and to the tensors is the architecture's business.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_worker.models.errors import LoadError

COUNTS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
MAX_COUNT = 1 << 31
MAX_NUMBER = 1e30  # of a rotation's or a norm's
FLAGS = ("tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias")
ROPES = ("rope_parameters", "rope_scaling")
# A rotation's numbers; `attention_factor` and the like may be left out, but what is there is a number.
ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_config(config: Mapping[str, Any], source: Path) -> None:
    """Raise LoadError, naming the field, for a value that no model can have. What is absent passes."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise LoadError(source, f"architectures is {_short(names)}; expected a list of names")
    for field in COUNTS:
        value = config.get(field)
        if value is not None and (not _whole(value) or not 1 <= value <= MAX_COUNT):
            raise LoadError(source, f"{field} is {_short(value)}; expected a whole number above 0")
    for field in FLAGS:
        if not isinstance(config.get(field) or False, bool):
            raise LoadError(source, f"{field} is {_short(config[field])}; expected true or false")
    for field in ("rms_norm_eps", "rope_theta"):
        _check_positive(config, field, source, "")
    if (eps := config.get("rms_norm_eps")) is not None and eps >= 1:
        raise LoadError(source, f"rms_norm_eps is {_short(eps)}; expected a number below 1")
    for field in ROPES:
        _check_rope(config.get(field), field, source)
    _check_ids(config.get("eos_token_id"), source)


def _check_rope(rope: Any, field: str, source: Path) -> None:
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise LoadError(source, f"{field} is {_short(rope)}; expected an object")
    for name in ROPE_NUMBERS:
        _check_positive(rope, name, source, f"{field}.")
    for name in ("rope_type", "type"):
        if not isinstance(rope.get(name, ""), str):
            raise LoadError(source, f"{field}.{name} is {_short(rope[name])}; expected a name")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if low is not None and low == high:
        raise LoadError(source, f"{field}.high_freq_factor is {high}, and so is low_freq_factor; expected a range")


def _check_positive(values: Mapping[str, Any], field: str, source: Path, prefix: str) -> None:
    if field not in values:
        return
    value = values[field]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
        raise LoadError(source, f"{prefix}{field} is {_short(value)}; expected a number above 0")


def _check_ids(ids: Any, source: Path) -> None:
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(_whole(token) for token in listed):
        raise LoadError(source, f"eos_token_id is {_short(ids)}; expected token ids")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
