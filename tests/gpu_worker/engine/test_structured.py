"""Structured answers through the engine: requests wait for their grammar outside the schedule, and fail alone."""

import re

import pytest

from gpu_worker.engine.api import ChoicePlan, Reason
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.models.registry import LoadedModel
from mesh.errors import InvalidRequest
from tests.gpu_worker.engine.grammars import EOS, spoken_folder, text_of

PATTERN = "[a-f]{4}-[0-9]{2,6}"
BAD = "a(b"


@pytest.fixture(scope="module")
def lab(torch_lab, tiny_model: LoadedModel, tmp_path_factory):
    """The tiny model, speaking printable ASCII."""
    return type(torch_lab)(spoken_folder(tmp_path_factory.mktemp("spoken")), tiny_model)


@pytest.fixture(scope="module")
def engines(lab):
    """Makes engines that share one compiler's process with the first."""
    made: list[BatchingEngine] = []

    def engine(**settings) -> BatchingEngine:
        one = lab.engine(**settings)
        if made:
            one._preparations = type(one._preparations)(made[0]._preparations._compiler)
        made.append(one)
        return one

    yield engine
    made[0]._preparations._compiler.close()


def plan(lab, request_id: str = "r", **options):
    return lab.plan(request_id, **({"ignore_eos": False, "max_tokens": 40, "temperature": 1.0} | options))


def finished(lab, engine, answers=None):
    """Step until nothing runs and nothing is being compiled, as the engine's process does."""
    answers = answers or lab.answers()
    while engine.has_work() or engine.preparing:
        lab.step(engine, answers)
    return answers


def test_an_answer_matches_its_structure_and_stops_where_that_ends(lab, engines):
    engine = engines()
    engine.submit(plan(lab, regex=PATTERN))
    answers = finished(lab, engine)
    end = answers.ends["r", 0]
    assert re.fullmatch(PATTERN, text_of(answers.ids["r", 0]))
    assert (end.reason, end.stop_token_id) == (Reason.STOP, EOS)
    assert end.completion_tokens == len(answers.ids["r", 0]) + 1


def test_while_a_grammar_compiles_others_run_and_admission_knows_of_it(lab, engines, answers):
    engine = engines()
    engine.submit(plan(lab, "structured", regex="[a-z]{3,3000}"))
    engine.submit(plan(lab, "free", max_tokens=3, ignore_eos=True))
    assert engine.preparing
    result = lab.step(engine, answers)
    assert {event.request_id for event in result.events} == {"free"}
    assert dict(result.load.running).keys() == {"structured", "free"}
    finished(lab, engine, answers)
    assert re.fullmatch("[a-z]{3,}", text_of(answers.ids["structured", 0]))


def test_what_cannot_be_compiled_is_refused_later_and_its_neighbour_is_untouched(lab, engines):
    alone = lab.answer(engines(), plan(lab, "good", max_tokens=20, ignore_eos=True))
    engine = engines()
    engine.submit(plan(lab, "good", max_tokens=20, ignore_eos=True))
    engine.submit(plan(lab, "bad", regex=BAD))
    answers = finished(lab, engine)
    [(refused, error)] = engine.take_refused()
    assert refused.request_id == "bad"
    assert isinstance(error, InvalidRequest)
    assert error.field == "regex"
    assert answers.ids == {("good", 0): alone}
    assert engine.take_refused() == []
    with pytest.raises(InvalidRequest, match="regex"):  # known by now: at once
        engine.submit(plan(lab, "again", regex=BAD))


@pytest.mark.parametrize("how", ["abort", "park"])
def test_a_request_whose_grammar_compiles_can_be_ended(lab, engines, answers, how):
    engine = engines()
    engine.submit(plan(lab, regex=f"({how}){{1,9}}"))
    getattr(engine, how)("r", 1)
    finished(lab, engine, answers)
    assert [end.reason for end in answers.ends.values()] == ([Reason.PARKED] if how == "park" else [])
    assert not answers.ids
    assert engine.take_refused() == []


def test_a_stopped_choice_ends_while_its_sibling_waits_for_the_grammar(lab, engines, answers):
    engine = engines()
    engine.submit(plan(lab, regex="(ab){2,4}", choices=[ChoicePlan(0), ChoicePlan(1)]))
    engine.stop_choice("r", 1, 0, 0)
    finished(lab, engine, answers)
    assert {choice: end.reason for (_, choice), end in answers.ends.items()} == {0: Reason.STOP, 1: Reason.STOP}
    assert list(answers.ids) == [("r", 1)]


def test_n_choices_differ_and_all_match(lab, engines):
    engine = engines()
    engine.submit(plan(lab, regex=PATTERN, choices=[ChoicePlan(index) for index in range(4)]))
    texts = [text_of(ids) for ids in finished(lab, engine).ids.values()]
    assert len(texts) == 4
    assert len(set(texts)) > 1
    assert all(re.fullmatch(PATTERN, text) for text in texts)


def test_a_resumed_answer_goes_on_token_for_token(lab, engines):
    whole = finished(lab, _submitted(engines(), plan(lab, regex=PATTERN))).ids["r", 0]
    for kept in (1, 5, len(whole)):
        resumed = plan(lab, regex=PATTERN, attempt=2, choices=[ChoicePlan(0, whole[:kept])])
        answers = finished(lab, _submitted(engines(), resumed))
        assert whole[:kept] + answers.ids.get(("r", 0), []) == whole
        assert answers.ends["r", 0].reason == Reason.STOP


def test_a_small_pool_changes_no_structured_answer(lab, engines):
    plans = [plan(lab, f"r{n}", prompt=[n + 3] * 40, regex="[a-z]{30,40}", max_tokens=50, seed=n) for n in range(4)]
    wide, narrow = engines(), engines(blocks=14)
    for each in plans:
        wide.submit(each)
        narrow.submit(each)
    expected, answers = finished(lab, wide), finished(lab, narrow)
    assert answers.steps[-1].load.preemptions > 0
    assert answers.ids == expected.ids


def test_emitted_ids_that_the_grammar_does_not_allow_fail_that_request_alone(lab, engines):
    engine = engines()
    engine.submit(plan(lab, "bad", regex=PATTERN, choices=[ChoicePlan(0, [90, 91])]))
    engine.submit(plan(lab, "good", regex=PATTERN))
    answers = finished(lab, engine)
    assert answers.ends["bad", 0].reason == Reason.ERROR
    assert answers.ends["good", 0].reason == Reason.STOP


def test_an_engine_that_cannot_follow_grammars_says_so(simulated_lab):
    with pytest.raises(InvalidRequest) as caught:
        simulated_lab.engine().submit(plan(simulated_lab, json_schema="{}"))
    assert caught.value.field == "json_schema"


def _submitted(engine: BatchingEngine, *plans) -> BatchingEngine:
    for each in plans:
        engine.submit(each)
    return engine
