"""(B25) One bad request is refused by name before any step; what still raises inside one ends that request only."""

import math

import pytest

from gpu_worker.engine.api import Reason
from gpu_worker.engine.grammar import GrammarFailed
from gpu_worker.engine.rows import Row
from mesh.errors import InvalidRequest

REFUSED = [
    ({"logit_bias": {191_222: -100.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {3: math.nan}}, "logit_bias"),
    ({"stop_token_ids": (97,)}, "stop_token_ids"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"top_logprobs": 1_000_000}, "top_logprobs"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"prompt": []}, "prompt_ids"),
    ({"prompt": [-1]}, "prompt_ids"),
    ({"prompt": [3, 97]}, "prompt_ids"),
    ({"prompt": [3] * 100}, "prompt_ids"),  # the pool of these tests would never hold it
    ({"json_schema": "{"}, "json_schema"),
    ({"regex": "a" * (65 << 10)}, "regex"),
    ({"regex": "a", "grammar": "b"}, "grammar"),
]


def neighbours(lab):
    return [
        lab.plan("greedy", [3, 4, 5], max_tokens=12),
        lab.plan("drawn", [7, 8], max_tokens=12, temperature=1.0, top_p=0.9, seed=5, frequency_penalty=0.5),
    ]


@pytest.fixture(scope="module")
def undisturbed(torch_lab):
    engine = torch_lab.engine(blocks=6)
    for plan in neighbours(torch_lab):
        engine.submit(plan)
    return torch_lab.finish(engine).ids


@pytest.mark.parametrize(("options", "field"), REFUSED)
def test_what_no_step_could_honour_is_refused_by_name_and_neighbours_answer_as_ever(lab, undisturbed, options, field):
    engine, answers = lab.engine(blocks=6), lab.answers()
    for plan in neighbours(lab):
        engine.submit(plan)
    lab.step(engine, answers)
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(lab.plan("bad", **({"ignore_eos": False} | options)))
    assert caught.value.field == field
    assert lab.finish(engine, answers).ids == undisturbed


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_a_temperature_next_to_nothing_is_greedy_and_disturbs_nobody(lab, undisturbed, temperature):
    engine = lab.engine(blocks=6)
    engine.submit(lab.plan("cold", [3, 4, 5], max_tokens=12, temperature=temperature, cache_salt=b"other"))
    for plan in neighbours(lab):
        engine.submit(plan)
    answers = lab.finish(engine)
    assert answers.ids.pop(("cold", 0)) == undisturbed["greedy", 0]
    assert answers.ids == undisturbed


class Poisoned:
    """A runner that raises in every step that holds the request "bad", before or after it was computed."""

    def __init__(self, runner, when: str) -> None:
        self._runner, self._when = runner, when

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, pieces, ending_ids):
        bad = any(piece.sequence.request.plan.request_id == "bad" for piece in pieces)
        if bad and self._when == "before":
            raise RuntimeError("a kernel failed")
        outcomes = self._runner.run(pieces, ending_ids)
        if bad:
            raise RuntimeError("a kernel failed")
        return outcomes


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_breaks_a_shared_step_fails_alone(lab, undisturbed, when):
    engine = lab.engine(blocks=6)
    engine._runner = Poisoned(engine._runner, when)
    for plan in [lab.plan("bad", [90], max_tokens=12), *neighbours(lab)]:
        engine.submit(plan)
    answers = lab.finish(engine)
    assert answers.ends["bad", 0].reason == Reason.ERROR
    assert answers.ends["bad", 0].message
    assert answers.ids == undisturbed


def test_an_exception_in_a_sampler_row_fails_alone(lab, undisturbed, monkeypatch):
    engine = lab.engine(blocks=6)
    adjust = Row.adjust

    def failing(row: Row, logits) -> None:
        if row.sampling.presence_penalty == 0.125:
            raise (GrammarFailed("broken") if row.choice else ArithmeticError("broken"))
        adjust(row, logits)

    monkeypatch.setattr(Row, "adjust", failing)
    for plan in [lab.plan("bad", [9], max_tokens=12, presence_penalty=0.125), *neighbours(lab)]:
        engine.submit(plan)
    answers = lab.finish(engine)
    assert answers.ends["bad", 0].reason == Reason.ERROR
    assert answers.ids == undisturbed
