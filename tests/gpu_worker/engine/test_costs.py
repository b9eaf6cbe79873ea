"""What steps cost, fitted from steps: against machines whose costs are known."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.costs import Shape, StepCosts, context_of

FIXED_S, ROW_S, READ_S, TOKEN_S, ATTEND_S = 0.005, 0.0009, 1.5e-6, 0.00045, 1.2e-7


def seconds(shape: Shape, slower: float = 1.0) -> float:
    """The machine: a small model on two cores."""
    rows = ROW_S * shape.rows + READ_S * (shape.row_context + shape.piece_context)
    return slower * (FIXED_S + rows + TOKEN_S * shape.tokens + ATTEND_S * shape.token_context)


def step(rows: int = 0, context: int = 300, start: int = 0, tokens: int = 0) -> Shape:
    return Shape(rows, rows * context, tokens, context_of(start, tokens), start if tokens else 0)


def learn(costs: StepCosts, shapes: list[Shape], took: Callable[[Shape], float] = seconds) -> None:
    for shape in shapes:
        costs.record(shape, took(shape))


def mixed(rng: random.Random, count: int) -> list[Shape]:
    """Steps of all sizes, half of them with prompts."""
    return [
        step(rng.randint(1, 32), rng.randint(20, 2000), rng.randint(0, 4000), rng.choice([0, 0, 40, 200, 800]))
        for _ in range(count)
    ]


@settings(max_examples=20)
@given(st.integers(0, 1 << 30), st.floats(0, 0.15))
def test_steps_of_all_sizes_are_foretold_in_spite_of_noise(seed: int, noise: float) -> None:
    rng, costs = random.Random(seed), StepCosts()
    learn(costs, mixed(rng, 150), lambda shape: seconds(shape) * rng.uniform(1 - noise, 1 + noise))
    for rows, context in ((4, 300), (16, 300), (32, 1000)):
        assert costs.decode_s(rows, rows * context) == pytest.approx(seconds(step(rows, context)), rel=0.1 + noise)
    for start, count in ((0, 400), (3000, 100)):
        wanted = seconds(step(0, 0, start, count)) - FIXED_S
        assert costs.prompt_s(start, count) == pytest.approx(wanted, rel=0.1 + noise)


def test_as_many_tokens_fit_as_take_the_time() -> None:
    costs = StepCosts()
    learn(costs, mixed(random.Random(2), 100))
    for start in (0, 500, 8000):
        assert costs.prompt_s(start, round(costs.fitting(start, 0.1))) == pytest.approx(0.1, rel=0.02)
    assert costs.fitting(8000, 0.1) < 0.4 * costs.fitting(0, 0.1)
    assert StepCosts().fitting(0, 0.1) == float("inf"), "nothing is known yet"


def test_a_small_piece_far_into_a_prompt_reads_all_before_it() -> None:
    costs = StepCosts()
    learn(costs, mixed(random.Random(3), 150))
    assert costs.prompt_s(8000, 16) == pytest.approx(16 * (TOKEN_S + 8008 * ATTEND_S) + 8000 * READ_S, rel=0.1)
    assert costs.fitting(8000, 7000 * READ_S) == 0


def test_one_stray_step_moves_what_is_expected_by_little() -> None:
    costs = StepCosts()
    learn(costs, mixed(random.Random(3), 60) + [step(16, 300, 500, 50)] * 20)
    before, room = costs.decode_s(16, 4800), costs.fitting(500, 0.05)
    costs.record(step(16, 300, 500, 50), 20 * seconds(step(16, 300, 500, 50)))
    assert costs.decode_s(16, 4800) == pytest.approx(before, rel=0.1)
    assert costs.fitting(500, 0.05) == pytest.approx(room, rel=0.15)


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_a_lasting_change_of_the_machine_is_followed_within_five_steps(slower: float) -> None:
    costs, shape = StepCosts(), step(16, 300, 500, 50)
    learn(costs, mixed(random.Random(4), 60) + [shape] * 20)
    learn(costs, [shape] * 5, lambda shape: seconds(shape, slower))
    expected = costs.decode_s(16, 4800) + costs.prompt_s(500, 50)
    assert expected == pytest.approx(seconds(shape, slower), rel=0.25)


def test_hours_of_decoding_do_not_wear_away_what_a_prompt_token_costs() -> None:
    costs = StepCosts()
    learn(costs, mixed(random.Random(5), 80))
    before = costs.prompt_s(0, 500)
    learn(costs, [step(8, 300 + n) for n in range(3000)])
    assert costs.prompt_s(0, 500) == pytest.approx(before, rel=0.05)


def test_the_slow_first_step_of_all_is_soon_forgotten() -> None:
    costs = StepCosts()
    costs.record(step(tokens=8), 2.0)  # all that is made once is made here
    learn(costs, [step(1, 8 + n) for n in range(3)] + [step(tokens=16), step(tokens=64)])
    assert costs.prompt_s(0, 500) < 2 * (seconds(step(tokens=500)))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 2000), st.floats(0, 100)), max_size=30))
def test_steps_of_any_length_give_costs_that_are_numbers_and_not_below_zero(steps) -> None:
    costs = StepCosts()
    for rows, tokens, duration_s in steps:
        costs.record(step(rows, 100, 0, tokens), duration_s)
    assert 0 <= costs.decode_s(16, 1600) < float("inf")
    assert 0 <= costs.prompt_s(0, 100) < float("inf")
    assert costs.fitting(100, 0.1) >= 0
