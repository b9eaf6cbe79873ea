"""How choices end, and what is free afterwards."""

import pytest

from gpu_worker.engine.api import ChoicePlan, FinishedEvent, Reason
from mesh.errors import AlreadyExists


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    """What is tested here is the engine's own work, so it holds for either."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "output"), [(255, 1, 1), (250, 100, 6), (1, 255, 255), (3, 1, 1)]
)
def test_the_context_clamps_max_tokens_and_ends_with_length(lab, answers, prompt_tokens, max_tokens, output):
    """B04: one documented answer for every budget."""
    engine = lab.engine()
    engine.submit(lab.plan("a", [3] * prompt_tokens, max_tokens=max_tokens))
    end = lab.finish(engine, answers).ends["a", 0]
    assert (end.reason, end.completion_tokens, len(answers.ids["a", 0])) == (Reason.LENGTH, output, output)


def test_a_stop_token_counts_and_is_named_but_not_sent(lab):
    engine = lab.engine()
    ids = lab.answer(engine, lab.plan("a", max_tokens=8))
    stop = next(token for token in ids if ids.index(token) > 0)
    engine.submit(lab.plan("b", max_tokens=8, stop_token_ids=(stop,)))
    answers = lab.finish(engine)
    end = answers.ends["b", 0]
    assert answers.ids["b", 0] == ids[: ids.index(stop)]
    assert (end.reason, end.stop_token_id, end.completion_tokens) == (Reason.STOP, stop, ids.index(stop) + 1)
    assert end.usage.completion_tokens == end.completion_tokens


def test_min_tokens_holds_endings_back(lab):
    engine = lab.engine()
    ids = lab.answer(engine, lab.plan("a", max_tokens=8))
    engine.submit(lab.plan("b", max_tokens=8, min_tokens=8, stop_token_ids=tuple(set(ids))))
    end = lab.finish(engine).ends["b", 0]
    assert (end.reason, end.completion_tokens) == (Reason.LENGTH, 8)


def test_eos_ends_a_choice_unless_it_is_ignored(torch_lab):
    engine = torch_lab.engine()
    options = {"max_tokens": 4, "logit_bias": {torch_lab.eos: 100.0}}
    engine.submit(torch_lab.plan("a", ignore_eos=False, **options))
    engine.submit(torch_lab.plan("b", ignore_eos=True, **options))
    answers = torch_lab.finish(engine)
    assert (answers.ends["a", 0].reason, answers.ends["a", 0].stop_token_id) == (Reason.STOP, torch_lab.eos)
    assert answers.ids["b", 0] == [torch_lab.eos] * 4


def test_stop_choice_ends_one_choice_and_counts_what_was_kept(lab, answers):
    engine = lab.engine()
    engine.submit(lab.plan("a", max_tokens=50, choices=[ChoicePlan(0), ChoicePlan(1)], temperature=1.0))
    while len(answers.ids.get(("a", 1), [])) < 6:
        lab.step(engine, answers)
    engine.stop_choice("a", 1, 1, keep_tokens=4)
    engine.stop_choice("a", 1, 7, keep_tokens=4)
    engine.stop_choice("unknown", 1, 0, keep_tokens=4)
    result = lab.step(engine, answers)
    (end,) = [event for event in result.events if isinstance(event, FinishedEvent)]
    assert (end.choice, end.reason, end.completion_tokens, end.last) == (1, Reason.STOP, 4, False)
    lab.finish(engine, answers)
    assert answers.ends["a", 0].usage.completion_tokens == 50 + 4


def test_park_ends_running_and_queued_choices_at_the_next_step(lab, answers):
    engine = lab.engine(max_sequences=1)
    engine.submit(lab.plan("a", max_tokens=50))
    engine.submit(lab.plan("b", max_tokens=50))
    for _ in range(3):
        lab.step(engine, answers)
    engine.park("a", 1)
    engine.park("b", 1)
    engine.park("b", 2)
    lab.step(engine, answers)
    assert [(end.reason, end.completion_tokens) for end in answers.ends.values()] == [
        (Reason.PARKED, 3),
        (Reason.PARKED, 0),
    ]
    assert not engine.has_work()
    assert engine.pool.used == 0


def test_abort_frees_every_block_before_the_next_step(lab, answers):
    engine = lab.engine()
    engine.submit(lab.plan("a", [5] * 100, max_tokens=50, choices=[ChoicePlan(i) for i in range(4)]))
    engine.submit(lab.plan("b", [6] * 100, max_tokens=3))
    for _ in range(4):
        lab.step(engine, answers)
    engine.abort("a", 2)
    assert engine.pool.used > 8
    engine.abort("a", 1)
    seen = len(answers.events)
    lab.finish(engine, answers)
    assert all(event.request_id == "b" for event in answers.events[seen:])
    engine.abort("a", 1)
    assert not engine.has_work()


def test_a_newer_attempt_replaces_an_older_one_and_never_the_reverse(lab, answers):
    engine = lab.engine()
    engine.submit(lab.plan("a", attempt=2))
    for attempt in (1, 2):
        with pytest.raises(AlreadyExists):
            engine.submit(lab.plan("a", attempt=attempt))
    engine.submit(lab.plan("a", attempt=3))
    lab.finish(engine, answers)
    assert {event.attempt for event in answers.events} == {3}
    engine.submit(lab.plan("a", attempt=1))  # nothing of it is here any more


@pytest.mark.parametrize("emitted", [[7, 8, 9], [7, 2]])
def test_a_resumed_choice_that_has_its_end_already_only_finishes(lab, answers, emitted):
    engine = lab.engine()
    engine.submit(lab.plan("a", max_tokens=3, ignore_eos=False, attempt=2, choices=[ChoicePlan(0, emitted)]))
    lab.finish(engine, answers)
    end = answers.ends["a", 0]
    assert answers.ids == {}
    assert (end.reason, end.completion_tokens) == ((Reason.LENGTH, 3) if len(emitted) == 3 else (Reason.STOP, 2))
    assert end.usage.completion_tokens == 0
    assert end.last
