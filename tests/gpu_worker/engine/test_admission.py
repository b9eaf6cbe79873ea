"""What `submit` refuses, and that refusing disturbs nobody."""

import math

import pytest

from gpu_worker.engine.api import ChoicePlan
from mesh.errors import InvalidRequest, Overloaded

BAD = [
    ({"logit_bias": {191222: -100.0}}, "logit_bias"),
    ({"stop_token_ids": (97,)}, "stop_token_ids"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_logprobs": 1_000_000}, "top_logprobs"),
    ({"prompt": []}, "prompt_ids"),
    ({"prompt": [-1]}, "prompt_ids"),
    ({"prompt": [3, 97]}, "prompt_ids"),
    ({"prompt": [3] * 256}, "prompt_ids"),
    ({"prompt": [3] * 257}, "prompt_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"seed": None}, "seed"),
    ({"adapter": "lora"}, "adapter"),
    ({"choices": []}, "choices"),
    ({"choices": [ChoicePlan(0), ChoicePlan(0)]}, "choices"),
    ({"choices": [ChoicePlan(index) for index in range(65)]}, "choices"),
    ({"choices": [ChoicePlan(index) for index in range(5_000)]}, "choices"),
    ({"choices": [ChoicePlan(0, [97])]}, "emitted_ids"),
]


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    """What is tested here is the engine's own work, so it holds for either."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("options", "field"), BAD)
def test_what_can_never_run_is_refused_by_name_and_neighbours_go_on(lab, answers, options, field):
    """B25 and B04 at the engine's edge."""
    engine = lab.engine()
    engine.submit(lab.plan("good"))
    lab.step(engine, answers)
    with pytest.raises(InvalidRequest) as raised:
        engine.submit(lab.plan("bad", **options))
    assert raised.value.field == field
    lab.finish(engine, answers)
    assert len(answers.ids["good", 0]) == 8
    assert {event.request_id for event in answers.events} == {"good"}


def test_more_choices_than_run_in_one_step_are_refused_by_an_idle_engine_too(lab, answers):
    engine = lab.engine(max_sequences=2)
    with pytest.raises(InvalidRequest) as raised:
        engine.submit(lab.plan("three", choices=[ChoicePlan(index) for index in range(3)]))
    assert raised.value.field == "choices"
    assert not engine.has_work()
    engine.submit(lab.plan("two", choices=[ChoicePlan(index) for index in range(2)]))
    assert len(lab.finish(engine, answers).ends) == 2


def test_more_waiting_tokens_than_allowed_are_refused_with_a_time(lab):
    engine = lab.engine(max_waiting_tokens=100)
    engine.submit(lab.plan("a", [3] * 200))  # an idle engine takes what can run
    with pytest.raises(Overloaded) as raised:
        engine.submit(lab.plan("b", [3] * 60))
    assert raised.value.retry_after_s > 0
    assert len(lab.finish(engine).ends) == 1


def test_more_waiting_sequences_than_allowed_are_refused(lab):
    engine = lab.engine(max_waiting_sequences=2)
    engine.submit(lab.plan("a"))
    engine.submit(lab.plan("b"))
    with pytest.raises(Overloaded):
        engine.submit(lab.plan("c"))


def test_a_pool_promised_to_others_refuses_until_they_leave(lab):
    engine = lab.engine(blocks=16, expected_growth=1.0, kv_promised=1.0)
    engine.submit(lab.plan("a", [3] * 100, max_tokens=100))
    with pytest.raises(Overloaded):
        engine.submit(lab.plan("b", [4] * 100, max_tokens=100))
    engine.abort("a", 1)
    assert len(lab.answer(engine, lab.plan("b", [4] * 100, max_tokens=100))) == 100


def test_a_pool_smaller_than_the_context_shortens_the_context(lab):
    engine = lab.engine(blocks=4)
    assert engine.info.context_tokens == 64
    assert len(lab.answer(engine, lab.plan("a", [3] * 10, max_tokens=200))) == 54
