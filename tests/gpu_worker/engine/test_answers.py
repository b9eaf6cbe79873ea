"""What the engine answers: the same tokens as a plain reference, whatever shares the batch, the cache or the pool."""

import random

import pytest
import torch

from gpu_worker.engine.api import AcceptedEvent, ChoicePlan


def prompts(count: int, lab, low: int = 1, high: int = 90) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(3, lab.vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    """What is tested here is the engine's own work, so it holds for either."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(tiny_folder):
    """Greedy output of transformers on the same weights."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_folder.path).eval()

    @torch.inference_mode()
    def greedy(prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    return greedy


def test_greedy_answers_equal_the_reference_alone_and_together(torch_lab, reference):
    wanted = {f"r{i}": (prompt, reference(prompt, 12)) for i, prompt in enumerate(prompts(10, torch_lab))}
    engine = torch_lab.engine(prefill_chunk=24)
    for request_id, (prompt, ids) in wanted.items():
        assert torch_lab.answer(engine, torch_lab.plan(request_id, prompt, max_tokens=12, cache_salt=b"alone")) == ids
    for request_id, (prompt, _) in wanted.items():
        engine.submit(torch_lab.plan(request_id, prompt, max_tokens=12, cache_salt=b"together"))
    together = torch_lab.finish(engine)
    assert {key: ids for (key, _), ids in together.ids.items()} == {key: ids for key, (_, ids) in wanted.items()}


def test_a_cached_prefix_gives_the_same_answer_and_is_reported(lab, answers):
    (prompt,) = prompts(1, lab, 80, 80)
    engine = lab.engine()
    first = lab.answer(engine, lab.plan("a", prompt))
    engine.submit(lab.plan("b", prompt))
    lab.finish(engine, answers)
    assert answers.ids["b", 0] == first
    assert answers.ends["b", 0].usage.cached == {1: 79}  # 80 are cached, but the last token is computed for its logits
    accepted = [event for event in answers.events if isinstance(event, AcceptedEvent)]
    assert [event.cached for event in accepted] == [{1: 79}]
    assert answers.steps[0].prompt_tokens == 1


@pytest.mark.parametrize("other", [{"cache_salt": b"tenant"}, {"prompt": list(range(4, 84))}])
def test_another_salt_or_prompt_finds_nothing(lab, answers, other):
    engine = lab.engine()
    lab.answer(engine, lab.plan("a", list(range(3, 83))))
    engine.submit(lab.plan("b", **({"prompt": list(range(3, 83))} | other)))
    lab.finish(engine, answers)
    assert answers.ends["b", 0].usage.cached == {}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_resumed_choice_goes_on_with_the_same_tokens(lab, temperature):
    (prompt,) = prompts(1, lab, 30, 30)
    options = {"max_tokens": 20, "temperature": temperature, "seed": 11, "frequency_penalty": 0.5}
    whole = lab.answer(lab.engine(), lab.plan("a", prompt, **options))
    for cut in (1, 7, 19):
        engine = lab.engine()
        resumed = lab.plan("a", prompt, attempt=2, choices=[ChoicePlan(0, whole[:cut])], **options)
        engine.submit(resumed)
        rest = lab.finish(engine)
        assert rest.ids["a", 0] == whole[cut:]
        end = rest.ends["a", 0]
        assert (end.completion_tokens, end.usage.completion_tokens) == (20, 20 - cut)
        assert end.usage.recomputed_tokens == 30 + cut - 1


def test_four_choices_share_the_prompt_and_end_one_by_one(lab, answers):
    """B06: prompt counted once, completion summed, one finish per index."""
    (prompt,) = prompts(1, lab, 40, 40)
    options = {"max_tokens": 30, "temperature": 2.0, "seed": 5, "min_tokens": 2, "stop_token_ids": tuple(range(40, 45))}
    choices = [ChoicePlan(i) for i in range(4)]
    engine = lab.engine()
    engine.submit(lab.plan("n", prompt, choices=choices, **options))
    lab.finish(engine, answers)
    alone = {}
    for i in range(4):
        single = lab.engine()
        single.submit(lab.plan("n", prompt, choices=[ChoicePlan(i)], **options))
        alone |= lab.finish(single).ids
    assert answers.ids == alone
    assert len(set(map(tuple, alone.values()))) == 4
    ends = list(answers.ends.values())
    assert sorted(end.choice for end in ends) == [0, 1, 2, 3]
    assert len({end.completion_tokens for end in ends}) > 2, "the test wants choices that end apart"
    assert [end.last for end in ends] == [False, False, False, True]
    assert ends[-1].usage.completion_tokens == sum(end.completion_tokens for end in ends)
    assert ends[-1].usage.prompt_tokens == 40
    computed = sum(step.prompt_tokens for step in answers.steps)
    assert computed == 40 + 3  # the prompt once; its last token again for each sibling, for its logits


def test_a_random_choice_depends_on_seed_choice_and_position_only(lab):
    (prompt,) = prompts(1, lab, 20, 20)
    options = {"temperature": 1.0, "max_tokens": 12}
    alone = lab.answer(lab.engine(), lab.plan("x", prompt, seed=1, **options))
    engine = lab.engine()
    for i, other in enumerate(prompts(6, lab)):
        engine.submit(lab.plan(f"o{i}", other, seed=i, **options))
    engine.submit(lab.plan("x", prompt, seed=1, **options))
    assert lab.finish(engine).ids["x", 0] == alone
    assert lab.answer(engine, lab.plan("x", prompt, seed=2, **options)) != alone


def test_log_probabilities_are_of_the_plain_distribution(torch_lab, tiny_folder, answers):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_folder.path).eval()
    engine = torch_lab.engine()
    engine.submit(
        torch_lab.plan("a", [9, 8, 7], max_tokens=1, temperature=0.5, top_k=1, logit_bias={5: 9.0}, top_logprobs=3)
    )
    torch_lab.finish(engine, answers)
    (logprob,) = next(event.logprobs for event in answers.events if getattr(event, "logprobs", None))
    with torch.inference_mode():
        wanted = model(torch.tensor([[9, 8, 7]])).logits[0, -1].log_softmax(-1)
    assert logprob.logprob == pytest.approx(float(wanted[logprob.token_id]), abs=1e-5)
    assert [token for token, _ in logprob.top] == wanted.topk(3).indices.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-5)
