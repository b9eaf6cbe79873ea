"""A GGUF Llama model as a Hugging Face folder for peers that read no GGUF: the same weights, dequantized to bf16.

Two things differ between the forms: the tensors' names, and the rows of the q and k projections, which llama.cpp's
converter interleaves for its rotary embedding (convert_hf_to_gguf.py, LlamaModel.permute); they are put back here.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh.bench.report import CannotMeasure
from mesh.gguf_names import hf_name
from mesh.models import ModelFolder

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def gguf_of(model: ModelFolder) -> Path:
    """The folder's one GGUF. Raises CannotMeasure if it has none."""
    found = sorted(model.path.glob("*.gguf"))
    if len(found) != 1:
        raise CannotMeasure(f"{model.path} holds {len(found)} GGUF files: peers are measured on a model with one")
    return found[0]


def make(model: ModelFolder, target: Path, on_tensor: Callable[[], None] = lambda: None) -> None:
    """Write `target` unless it is there, whole or not at all. Raises CannotMeasure for other architectures."""
    from gguf import GGUFReader

    if (target / "model.safetensors").is_file():
        return
    reader = GGUFReader(gguf_of(model))
    config = config_of(reader)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in _COPIED:
            if (model.path / name).is_file():
                shutil.copy(model.path / name, part / name)
        _write_safetensors(reader, config, part / "model.safetensors", on_tensor)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def config_of(reader: "GGUFReader") -> dict[str, Any]:
    """config.json of a Llama model."""

    def get(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    architecture = get("general.architecture")
    if architecture != "llama":
        raise CannotMeasure(f"peers are measured on Llama models only, and this GGUF is {architecture!r}")
    heads, hidden = get("llama.attention.head_count"), get("llama.embedding_length")
    theta = get("llama.rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "intermediate_size": get("llama.feed_forward_length"),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # what newer readers look at
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
    }


def name_of(name: str) -> str:
    """Hugging Face's name of a tensor. Raises CannotMeasure for one that a plain Llama does not have."""
    if (known := hf_name(name)) is None:
        raise CannotMeasure(f"the GGUF has a tensor {name!r}, which the conversion for peers does not know")
    return known


def bf16_bits(values: "NDArray[np.float32]") -> "NDArray[np.uint16]":
    """The upper halves of fp32, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def half_split(weight: "NDArray[np.float32]", heads: int) -> "NDArray[np.float32]":
    """Rows (head, pair, half), as llama.cpp has them, to (head, half, pair)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_safetensors(reader: "GGUFReader", config: dict[str, Any], path: Path, on_tensor: Callable[[], None]) -> None:
    """The format: length of the header (u64), header (JSON: dtype, shape, offsets), then the tensors' bytes."""
    from gguf import dequantize

    header: dict[str, Any] = {}
    offset = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        size = 2 * int(tensor.n_elements)
        header[name_of(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type)
            projection = name_of(tensor.name).split(".")[-2]
            if projection in heads:
                weight = half_split(weight, heads[projection])
            file.write(bf16_bits(weight).tobytes())
            on_tensor()
