"""The naive baseline answers alike and wastes what it says it wastes."""

from collections.abc import Sequence as Many

import pytest

from gpu_worker.engine.api import ChoicePlan
from gpu_worker.engine.runner import Outcome
from gpu_worker.engine.sequence import Piece, blocks_for
from gpu_worker.engine.static_policy import BATCH

STATIC = {"policy": "static"}


class Watched:
    """Passes a runner on, and keeps what it was asked to compute."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.check, self.clear, self.parts = runner.check, runner.clear, runner.parts
        self.steps: list[list[tuple[int, int]]] = []

    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        self.steps.append([(piece.start, piece.count) for piece in pieces])
        return self._runner.run(pieces, ending_ids)

    @property
    def tokens(self) -> int:
        return sum(count for step in self.steps for _, count in step)


def watched(engine) -> Watched:
    """The runner inside the padded one, watched from now on."""
    engine._runner._runner = watch = Watched(engine._runner._runner)
    return watch


def plans(lab, count: int = 20) -> list:
    """Prompts of 1 to 58 tokens, answers of 1 to 20."""
    return [
        lab.plan(f"r{n}", [3 + (n + at) % 90 for at in range(1 + 3 * n)], max_tokens=1 + 7 * n % 20, temperature=n % 2)
        for n in range(count)
    ]


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("chunk", [16, 1024])
def test_answers_are_those_of_the_continuous_policy(lab, chunk) -> None:
    engine, other = lab.engine(**STATIC, prefill_chunk=chunk), lab.engine()
    for plan in plans(lab):
        engine.submit(plan)
        other.submit(plan)
    assert lab.finish(engine).ids == lab.finish(other).ids
    assert engine.info.policy == "static"


def test_a_batch_computes_the_padded_prompts_and_runs_until_the_longest_answer_is_done(lab) -> None:
    engine = lab.engine(blocks=1000, **STATIC)
    watch = watched(engine)
    lengths = [(10, 3), (40, 12), (25, 1), (40, 5)]
    for n, (prompt, answer) in enumerate(lengths):
        engine.submit(lab.plan(f"r{n}", [5 + n] * prompt, max_tokens=answer))
    lab.finish(engine)
    assert watch.tokens == 4 * 40 + 4 * 11
    assert [len(step) for step in watch.steps[-11:]] == [4] * 11


def test_batches_are_of_eight_in_order_of_arrival_and_do_not_overlap(lab, answers) -> None:
    engine = lab.engine(blocks=1000, **STATIC)
    for n in range(20):
        engine.submit(lab.plan(f"r{n}", [5 + n] * 20, max_tokens=3 + n % 5))
    while engine.has_work():
        running = {request_id for request_id, at in lab.step(engine, answers).load.computed.items() if at}
        batches = {int(request_id[1:]) // BATCH for request_id in running}
        assert len(batches) <= 1
    assert [int(event.request_id[1:]) // BATCH for event in answers.ends.values()] == [0] * 8 + [1] * 8 + [2] * 4


def test_kv_for_the_longest_answer_is_used_from_the_first_step_to_the_batchs_end(lab, answers) -> None:
    engine = lab.engine(blocks=1000, **STATIC)
    for n, (prompt, answer) in enumerate([(10, 100), (50, 2), (10, 2)]):
        engine.submit(lab.plan(f"r{n}", [5 + n] * prompt, max_tokens=answer))
    while engine.has_work():
        load = lab.step(engine, answers).load
        assert load.used_blocks == (3 * blocks_for(50 + 100) if engine.has_work() else 0)


def test_nothing_is_found_again(lab, answers) -> None:
    engine = lab.engine(**STATIC)
    for n in range(2):
        engine.submit(lab.plan(f"r{n}", [7] * 64, max_tokens=2))
        lab.finish(engine, answers)
    assert [end.usage.cached for end in answers.ends.values()] == [{}, {}]
    assert engine.pool.free == engine.pool.total


def test_a_batch_that_finds_no_room_is_smaller_and_nobody_is_lost(lab, answers) -> None:
    engine = lab.engine(blocks=16, **STATIC)
    for n in range(6):
        engine.submit(lab.plan(f"r{n}", [5 + n] * 100, max_tokens=100 - 20 * n % 60))
    lab.finish(engine, answers)
    assert len(answers.ends) == 6


def test_an_answer_near_the_context_shares_a_batch_with_a_long_one(lab) -> None:
    """The row that ends first has no position left for what nobody wants."""
    both = [lab.plan("end", [5] * 240, max_tokens=100), lab.plan("long", [6] * 10, max_tokens=200)]
    engine, other = lab.engine(blocks=100, **STATIC), lab.engine()
    for plan in both:
        engine.submit(plan)
        other.submit(plan)
    assert lab.finish(engine).ids == lab.finish(other).ids


def test_an_abort_leaves_its_row_and_the_last_one_frees_all(lab, answers) -> None:
    engine = lab.engine(blocks=1000, **STATIC)
    for n in range(3):
        engine.submit(lab.plan(f"r{n}", [5 + n] * 40, max_tokens=50, choices=[ChoicePlan(0), ChoicePlan(1)]))
    lab.step(engine, answers)
    used = engine.pool.used
    engine.abort("r0", 1)
    lab.step(engine, answers)
    assert engine.pool.used == used
    engine.abort("r1", 1)
    engine.abort("r2", 1)
    assert engine.pool.used == 0
    assert not engine.has_work()
