"""The default model as it is served: what it says of itself, and an answer that ends by itself."""

import pytest
from tokenizers import Tokenizer

from gpu_worker.engine.build import build_engine
from gpu_worker.engine.config import EngineConfig

from .reference import references


@pytest.fixture(scope="module")
def real_engine(real_folder):
    return build_engine(EngineConfig(model=real_folder.name, kv_bytes=1 << 28), lambda fraction, what: None)


def test_the_capital_of_france_is_paris_and_there_the_answer_ends(lab, real_engine, real_folder):
    asked = references()[0]
    assert asked.name == "What is the capital of France?"
    real_engine.submit(lab.plan("r", asked.prompt, max_tokens=24, ignore_eos=False))
    answers = lab.finish(real_engine)
    said, end = answers.ids["r", 0], answers.ends["r", 0]
    assert end.stop_token_id == 2
    assert [*said, end.stop_token_id] == asked.output[: len(said) + 1]
    assert "Paris" in Tokenizer.from_file(str(real_folder.tokenizer)).decode(said)


def test_the_model_says_what_it_is(real_engine):
    info = real_engine.info
    assert (info.architecture, info.vocab_size, info.layers, info.kv_heads, info.head_dim) == (
        "LlamaForCausalLM", 49152, 30, 3, 64,
    )  # fmt: skip
    assert info.eos_token_ids == [2]
    assert len(info.model_digest) == len(info.tokenizer_digest) == 32
