"""Tiny random Llamas in every variant that is served: logits equal transformers'."""

import random

import pytest
import torch

IDS = [random.Random(4).randrange(61) for _ in range(70)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "one_head_each": {"num_key_value_heads": 4},
    "wide_heads": {"head_dim": 24},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
}


# What computes: each is held against transformers.
KERNELS = ("native", "torch")


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_safetensors_logits_equal_transformers(bench, saved, variant, kernels):
    options = VARIANTS[variant]
    folder = saved(**options)
    assert_close(bench.logits_of(folder, IDS, kernels), bench.reference_logits(bench.random_llama(**options), IDS))


def test_a_sharded_checkpoint_reads_like_a_single_one(bench, saved):
    folder = saved(shard="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_close(bench.logits_of(folder, IDS), bench.reference_logits(bench.random_llama(), IDS))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", ["plain", "tied", "biased", "one_head_each"])
def test_gguf_logits_equal_transformers(bench, tmp_path, variant, kernels):
    model = bench.random_llama(**(VARIANTS[variant] | {"mlp_bias": False}))
    bench.write_gguf(model, tmp_path / "model.gguf")
    assert_close(bench.logits_of(tmp_path, IDS, kernels), bench.reference_logits(model, IDS))


def test_a_16_bit_checkpoint_is_widened_exactly(bench, tmp_path):
    model = bench.random_llama()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert_close(bench.logits_of(tmp_path, IDS), bench.reference_logits(model.float(), IDS))
