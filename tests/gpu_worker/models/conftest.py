"""Tiny random Llamas on disk, in both formats, and a way to run the decoder whole over a prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.measure.logits import model_logits
from gpu_worker.models.registry import load
from mesh.models import ModelFolder

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | options))).eval()
    for name, parameter in model.named_parameters():  # norms and biases start out trivial; these shall matter
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def write_gguf(model: LlamaForCausalLM, path: Path, kind: type[gguf.GGUFWriter] = gguf.GGUFWriter) -> None:
    """As llama.cpp's converter does, the interleaving of q and k included."""
    config = model.config
    writer = kind(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, tensor in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{GGUF_NAMES[rest]}"
        else:
            target = GGUF_NAMES[stem]
        array = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if stem.endswith(part):
                array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(folder: Path, ids: list[int], kernels: str = "native", precision: str = "fp32") -> torch.Tensor:
    """Our decoder's logits [len(ids), V] after every token of one sequence."""
    device = torch.device("cpu")
    model = load(ModelFolder("m", folder), device, precision, lambda fraction, what: None, kernels)
    return model_logits(model, ids, device)


@torch.inference_mode()
def reference_logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


class Bench:
    """What the tests of this folder share."""

    random_llama = staticmethod(random_llama)
    write_gguf = staticmethod(write_gguf)
    logits_of = staticmethod(logits_of)
    reference_logits = staticmethod(reference_logits)


@pytest.fixture(scope="session")
def bench() -> type[Bench]:
    return Bench


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """A random Llama's folder: safetensors by transformers, with what else `save_pretrained` is told."""

    def save(shard: str = "1GB", **options: Any) -> Path:
        random_llama(**options).save_pretrained(tmp_path, max_shard_size=shard)
        return tmp_path

    return save
