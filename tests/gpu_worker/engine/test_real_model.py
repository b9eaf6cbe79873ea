"""The default model: greedy answers equal transformers' on the same dequantized weights."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.torch_engine import around
from gpu_worker.models.registry import load, open_checkpoint

QUESTIONS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Name three primary colours.",
    "What is 2 + 2?", "Translate 'good morning' to Spanish.", "Who wrote Hamlet?", "Explain gravity to a child.",
    "List five animals.", "What do plants need to grow?", "Give me a recipe for tea.", "What is a prime number?",
    "Tell me a joke.", "Why is the sky blue?", "What is Python?", "Name a planet.", "How many days has a week?",
    "Describe a cat in one sentence.", "What is the opposite of hot?", "Write one line of a poem.",
    "日本の首都はどこですか?",
]  # fmt: skip
TOKENS = 24


@pytest.fixture(scope="module")
def real_engine(real_folder):
    model = load(real_folder, torch.device("cpu"), "fp32", lambda fraction, what: None)
    return around(EngineConfig(model=real_folder.name, kv_bytes=1 << 28), real_folder, model)


@pytest.fixture(scope="module")
def reference(real_folder):
    """transformers' model with the dequantized weights; made without its own, slow, initialization."""
    checkpoint = open_checkpoint(real_folder.path)
    settings = {key: value for key, value in checkpoint.config.items() if key not in ("architectures", "qkv_bias")}
    config = LlamaConfig(**settings)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


@pytest.fixture(scope="module")
def encoded(real_folder):
    tokenizer = Tokenizer.from_file(str(real_folder.tokenizer))

    def encode(question: str) -> list[int]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return tokenizer.encode(text, add_special_tokens=False).ids

    return {question: encode(question) for question in QUESTIONS}, tokenizer


@torch.inference_mode()
def greedy_choices(model, prompt: list[int], output: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each of the output's: equal to `output` iff that is greedy."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


def test_twenty_greedy_answers_equal_transformers(lab, real_engine, reference, encoded):
    prompts, tokenizer = encoded
    for question, ids in prompts.items():
        real_engine.submit(lab.plan(question, ids, max_tokens=TOKENS, ignore_eos=False))
    answers = lab.finish(real_engine)
    for question, ids in prompts.items():
        end = answers.ends[question, 0]
        ours = answers.ids[question, 0] + ([end.stop_token_id] if end.stop_token_id is not None else [])
        assert ours == greedy_choices(reference, ids, ours), question
        assert end.stop_token_id is not None or len(ours) == TOKENS
    assert "Paris" in tokenizer.decode(answers.ids[QUESTIONS[0], 0])


def test_the_model_says_what_it_is(real_engine):
    info = real_engine.info
    assert (info.architecture, info.vocab_size, info.layers, info.kv_heads, info.head_dim) == (
        "LlamaForCausalLM", 49152, 30, 3, 64,
    )  # fmt: skip
    assert info.eos_token_ids == [2]
    assert len(info.model_digest) == len(info.tokenizer_digest) == 32
