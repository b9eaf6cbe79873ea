"""Greedy answers in every precision against transformers in fp32, as vLLM's log-probability test asks."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from gpu_worker.engine import torch_engine
from gpu_worker.engine.config import EngineConfig
from gpu_worker.measure.agreement import LIKELIEST, GreedyRun, disagreement
from gpu_worker.models.registry import PRECISIONS

QUESTIONS = [
    "What is the capital of France?", "Why is the sky blue?", "Name three primary colours.", "What is 2 + 2?",
    "Who wrote Hamlet?", "Write one line of a poem.", "Tell me a joke.", "日本の首都はどこですか?",
]  # fmt: skip
TOKENS = 24
OTHERS = [[9, 8, 7, 6, 5], [1, 9, 8, 7, 6]]


def test_equal_runs_agree():
    assert disagreement(GreedyRun([1, 2], OTHERS), GreedyRun([1, 2], OTHERS)) == ""


def test_a_near_tie_agrees_and_what_follows_it_does_not_count():
    ours = GreedyRun([1, 2, 30], [[1], [2, 3], [30]])
    theirs = GreedyRun([1, 3, 40], [[1], [3, 2], [40]])
    assert disagreement(ours, theirs) == ""


def test_a_token_that_the_other_side_finds_unlikely_disagrees():
    ours, theirs = GreedyRun([1, 2], [[1], [2, 3]]), GreedyRun([1, 3], [[1], [3, 4]])
    assert disagreement(ours, theirs) == "position 1: our token 2 is none of theirs, [3, 4]"
    assert disagreement(theirs, ours) == "position 1: their token 2 is none of ours, [3, 4]"


@torch.inference_mode()
def greedy_along(model: LlamaForCausalLM, prompt: list[int], output: list[int]) -> GreedyRun:
    """The reference's run for as long as it says what `output` says, which is as far as runs are compared."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    top = logits.topk(LIKELIEST, dim=-1).indices.tolist()
    return GreedyRun([ids[0] for ids in top], top)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_greedy_answers_agree_with_transformers(precision, lab, real_folder, real_model, real_reference):
    tokenizer = Tokenizer.from_file(str(real_folder.tokenizer))
    config = EngineConfig(model=real_folder.name, kv_bytes=1 << 28)
    engine = torch_engine.around(config, real_folder, real_model(precision))
    prompts = {}
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompts[question] = tokenizer.encode(text, add_special_tokens=False).ids
        engine.submit(lab.plan(question, prompts[question], max_tokens=TOKENS, top_logprobs=LIKELIEST))
    answers = lab.finish(engine)
    for question, ids in prompts.items():
        ours = answers.ids[question, 0]
        likeliest = [[token for token, _ in one.top] for one in _logprobs(answers, question)]
        assert len(ours) == len(likeliest) == TOKENS
        assert disagreement(GreedyRun(ours, likeliest), greedy_along(real_reference, ids, ours)) == "", question


def _logprobs(answers, question: str) -> list:
    return [one for event in answers.events if event.request_id == question for one in getattr(event, "logprobs", ())]
