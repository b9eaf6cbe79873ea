"""KV's number format: what it is by default, what it can be, and that a block is as large as its geometry says."""

import pytest
import torch

from gpu_worker.models.errors import LoadError
from gpu_worker.models.native_llama import NativeLlama
from gpu_worker.models.registry import load
from mesh.blocks import BLOCK_TOKENS
from mesh.kv import KvGeometry
from mesh.models import ModelFolder


@pytest.fixture
def loaded(saved):
    """`loaded(precision, kv_precision, kernels, …)`: the decoder of a random Llama."""

    def build(precision, kv_precision, kernels="native", **options):
        folder = ModelFolder("m", saved(**options))
        return load(folder, torch.device("cpu"), precision, lambda fraction, what: None, kernels, kv_precision).decoder

    return build


@pytest.mark.parametrize(
    ("precision", "kv_precision", "kv_dtype"),
    [
        ("fp32", "auto", "fp32_tiled"),
        ("bf16", "auto", "bf16_tiled"),
        ("int8", "auto", "int8_tiled"),
        ("int4", "auto", "int8_tiled"),
        ("int8", "bf16", "bf16_tiled"),
        ("fp32", "int8", "int8_tiled"),
    ],
)
def test_blocks_are_as_large_as_their_geometry_says(loaded, precision, kv_precision, kv_dtype):
    decoder = loaded(precision, kv_precision)
    assert isinstance(decoder, NativeLlama)
    assert decoder.kv_dtype == kv_dtype
    shape = decoder.kv_shape
    geometry = KvGeometry(kv_dtype, BLOCK_TOKENS, shape.layers, shape.kv_heads, shape.head_dim)
    assert decoder.block_bytes == geometry.bundle_bytes


def test_heads_that_bytes_do_not_fit_have_bf16_or_say_so(loaded):
    odd = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    assert loaded("int8", "auto", **odd).kv_dtype == "bf16_tiled"
    with pytest.raises(LoadError, match=r"kv_precision int8 .* multiple of 4, not 6; try bf16"):
        loaded("int8", "int8", **odd)


def test_torch_keeps_kv_in_the_precision_of_the_weights_or_says_so(loaded):
    loaded("bf16", "bf16", "torch")
    with pytest.raises(LoadError, match="kv_precision int8 needs the CPU kernels"):
        loaded("fp32", "int8", "torch")
