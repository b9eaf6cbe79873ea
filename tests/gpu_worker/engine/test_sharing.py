"""Blocks that sequences share, down to their tokens: who computes what, who copies, and that no answer changes."""

import pytest
import torch

from gpu_worker.engine.api import ChoicePlan
from gpu_worker.models.paged import KvShape, PagedKv

PROMPT = [3 + at % 90 for at in range(40)]  # two whole blocks and eight tokens


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    """What is tested here is the engine's own work, so it holds for either."""
    return request.getfixturevalue(request.param)


def counts(engine):
    return engine._schedule.holdings.counts


@pytest.mark.parametrize("length", [33, 40, 48, 49])
def test_a_prompt_that_was_answered_computes_only_its_last_token(lab, answers, length):
    prompt = (PROMPT + PROMPT)[:length]
    engine = lab.engine()
    first = lab.answer(engine, lab.plan("a", prompt))
    engine.submit(lab.plan("b", prompt))
    lab.finish(engine, answers)
    assert answers.ids["b", 0] == first
    assert answers.ends["b", 0].usage.cached == {1: length - 1}
    assert sum(step.prompt_tokens for step in answers.steps) == 1


def test_a_prompt_that_parts_inside_a_block_goes_on_from_there(lab, answers):
    other = [*PROMPT[:21], 95, *PROMPT[22:]]
    alone = lab.answer(lab.engine(), lab.plan("b", other))
    engine = lab.engine()
    lab.answer(engine, lab.plan("a", PROMPT))
    engine.submit(lab.plan("b", other))
    lab.finish(engine, answers)
    assert answers.ids["b", 0] == alone
    assert answers.ends["b", 0].usage.cached == {1: 21}
    assert counts(engine).copied_blocks == 1


def test_a_next_turn_goes_on_in_the_block_where_the_answer_ended_without_a_copy(lab, answers):
    engine = lab.engine()
    said = lab.answer(engine, lab.plan("a", PROMPT, max_tokens=4))
    turn = [*PROMPT, *said[:3], *range(50, 60)]
    alone = lab.answer(lab.engine(), lab.plan("b", turn))
    engine.submit(lab.plan("b", turn))
    lab.finish(engine, answers)
    assert answers.ids["b", 0] == alone
    assert answers.ends["b", 0].usage.cached == {1: 43}
    assert (counts(engine).partial_hits, counts(engine).copied_blocks) == (1, 0)


def test_a_prompt_that_runs_already_is_shared_and_its_last_block_copied(lab, answers):
    alone = lab.answer(lab.engine(), lab.plan("a", PROMPT, max_tokens=12))
    engine = lab.engine()
    engine.submit(lab.plan("a", PROMPT, max_tokens=12))
    for _ in range(4):
        lab.step(engine, answers)
    engine.submit(lab.plan("b", PROMPT, max_tokens=12))
    lab.finish(engine, answers)
    assert answers.ids == {("a", 0): alone, ("b", 0): alone}
    assert answers.ends["b", 0].usage.cached == {1: 39}
    assert counts(engine).copied_blocks == 1


def test_another_tenant_finds_no_beginning_of_a_block(lab, answers):
    """B14, inside a block."""
    engine = lab.engine()
    lab.answer(engine, lab.plan("a", PROMPT[:10]))
    engine.submit(lab.plan("b", PROMPT[:10], cache_salt=b"tenant"))
    lab.finish(engine, answers)
    assert answers.ends["b", 0].usage.cached == {}


def test_choices_share_the_prompt_and_start_together_as_soon_as_it_is_computed(lab, answers):
    engine = lab.engine()
    engine.submit(lab.plan("n", PROMPT, choices=[ChoicePlan(i) for i in range(4)], temperature=1.0, max_tokens=20))
    lab.step(engine, answers)
    assert set(answers.ids) == {("n", 0)}
    assert engine.pool.used == 3
    lab.step(engine, answers)
    assert set(answers.ids) == {("n", choice) for choice in range(4)}, "all start in the step after the prompt"
    assert engine.pool.used == 2 + 4, "two blocks of the prompt, and one each that they write in"
    assert counts(engine).copied_blocks == 3
    assert sum(step.prompt_tokens for step in answers.steps) == 40 + 3
    lab.finish(engine, answers)


@pytest.mark.parametrize("finished", [0, 2])
def test_cancelling_choices_half_way_frees_the_prompt_they_share_once(lab, answers, finished):
    """B06: four choices of different lengths, two of them done, or none."""
    engine = lab.engine()
    engine.submit(lab.plan("n", PROMPT, choices=[ChoicePlan(i) for i in range(4)], temperature=1.0, max_tokens=60))
    for _ in range(6):
        lab.step(engine, answers)
    for choice in range(finished):
        engine.stop_choice("n", 1, choice, 1 + choice)
    lab.step(engine, answers)
    assert len(answers.ends) == finished
    shared = engine.pool.hold(engine._schedule.running[0].keys_up_to(32))
    assert [engine.pool.holders(block) for block in shared] == [4 - finished + 1] * 2
    engine.pool.release(shared)
    engine.abort("n", 1)
    assert engine.pool.used == 0
    engine.pool.check()
    assert not engine.has_work()
    assert lab.answer(engine, lab.plan("again", PROMPT)) == lab.answer(lab.engine(), lab.plan("again", PROMPT))


def test_four_choices_end_one_by_one_each_whole_and_free_what_only_they_hold(lab, answers):
    """B06: different lengths, one ended by a stop token."""
    stops = {"stop_token_ids": tuple(range(40, 46)), "min_tokens": 2}
    plan = {"temperature": 2.0, "seed": 5, "max_tokens": 40} | stops
    engine = lab.engine()
    engine.submit(lab.plan("n", PROMPT, choices=[ChoicePlan(i) for i in range(4)], **plan))
    used = []
    while engine.has_work():
        lab.step(engine, answers)
        used.append((len(answers.ends), engine.pool.used))
    alone = {}
    for i in range(4):
        alone[i] = lab.answer(lab.engine(), lab.plan("n", PROMPT, choices=[ChoicePlan(i)], **plan))
    assert {choice: ids for (_, choice), ids in answers.ids.items()} == alone
    assert sorted(answers.ends) == [("n", choice) for choice in range(4)]
    assert used[-1] == (4, 0)
    assert [end.last for end in answers.ends.values()] == [False, False, False, True]


def test_a_copy_is_the_whole_block_and_leaves_the_source_alone():
    kv = PagedKv(KvShape(3, 2, 4, 1), 4, torch.device("cpu"), torch.bfloat16)
    payload = bytes(at % 251 for at in range(kv.block_bytes))
    kv.write_block(1, payload)
    kv.write_block(3, bytes(kv.block_bytes))
    kv.copy_block(1, 3)
    assert bytes(kv.read_block(3)) == bytes(kv.read_block(1)) == payload
    kv.clear([3])
    assert bytes(kv.read_block(1)) == payload


def test_a_copy_into_a_block_that_was_to_be_cleared_is_not_cleared(torch_lab):
    """A victim's new block can become the target of a copy while the same step is planned."""
    lab = torch_lab
    engine = lab.engine(blocks=4)
    lab.answer(engine, lab.plan("a", PROMPT[:8], max_tokens=1))
    holdings = engine._schedule.holdings
    grown, started = (engine._request(lab.plan(name, PROMPT[:8])).sequences[0] for name in ("grown", "started"))
    grown.ids = [70, *grown.ids]
    holdings.start(grown)
    assert holdings.grow(grown, 9)
    target = grown.blocks[0]
    holdings.release(grown)
    holdings.start(started)
    assert started.blocks == [target], "the test wants the block that was given up"
    assert (started.computed, holdings.take_fresh()) == (7, [])
