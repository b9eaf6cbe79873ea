"""Prompts enter in pieces cut by time: gaps are held, and prompts get their share. Simulated steps, no clock."""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.api import TokensEvent
from gpu_worker.engine.costs import Shape, context_of
from gpu_worker.engine.pacing import FIRST_TOKENS, LEAST_SHARE, LEAST_TOKENS, Goals, Pace, Streams
from mesh.blocks import BLOCK_TOKENS

ROWS, CONTEXT = 16, 16 * 300
READ_S = 0.6e-6  # the KV of a token


@dataclass
class Machine:
    """A pace, and the machine whose steps it sees. Costs grow with context, and steps vary by `noise`."""

    pace: Pace
    token_s: float = 0.00045
    slower: float = 1.0
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.step(Shape(0, 0, 8, 32), 50)  # the warm-up
        for _ in range(3):
            self.step(Shape(1, 10))

    def calm_s(self, rows: int = ROWS, context: int = CONTEXT) -> float:
        return self.slower * (0.005 + 0.0009 * rows + READ_S * context)

    def step(self, shape: Shape, longer: float = 1.0) -> float:
        computed_s = self.token_s * (shape.tokens + shape.token_context / 4000)
        prompt_s = self.slower * (computed_s + READ_S * shape.piece_context)
        spread = self.rng.uniform(1 - self.noise, 1 + self.noise)
        duration_s = (self.calm_s(shape.rows, shape.row_context) + prompt_s) * spread * longer
        self.pace.record(shape, duration_s)
        return duration_s

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.step(Shape(ROWS, CONTEXT))

    def prompt(self, tokens: int, rows: int = 0, stray: int = -1) -> list[tuple[int, float]]:
        """Each step's (prompt tokens, seconds) until a prompt is done; step number `stray` takes ten times as long."""
        start, steps = 0, []
        context = rows * CONTEXT // ROWS
        while start < tokens:
            count = self.pace.budget(Streams(rows, context), rows + 1).fitting(start, tokens - start)
            longer = 10.0 if len(steps) == stray else 1.0
            steps.append((count, self.step(Shape(rows, context, count, context_of(start, count), start), longer)))
            start += count
        return steps


def machine(stretch: float = 2.0, itl_target_s: float = 0.0, **options: float) -> Machine:
    return Machine(Pace(Goals(2048, 0.5, stretch, itl_target_s)), **options)


def total_s(steps: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in steps)


@pytest.mark.parametrize(("stretch", "longest", "dearest"), [(2.25, 2.5, 2.1), (3.2, 3.6, 1.6), (5.0, 5.5, 1.4)])
def test_a_long_prompt_beside_sixteen_streams_costs_them_and_itself_what_its_preset_says(stretch, longest, dearest):
    """A step is `longest` times the undisturbed at p99 at most, the first token `dearest` times its time alone."""
    here = machine(stretch, noise=0.05)
    alone_s = total_s(here.prompt(8000))
    here.decode(50)
    steps = here.prompt(8000, ROWS)
    gaps = sorted(seconds for _, seconds in steps)
    assert gaps[int(0.99 * len(gaps))] < longest * here.calm_s() * (1 + here.noise)
    assert total_s(steps) < dearest * alone_s


def growing(here: Machine, context: int, steps: int) -> list[float]:
    """Steps with prompts beside streams whose contexts grow from `context` a stream on by 20 tokens a step."""
    found = []
    for number in range(steps):
        streams = Streams(ROWS, ROWS * (context + 20 * number))
        count = here.pace.budget(streams, ROWS).fitting(1000, 4000)
        found.append(here.step(Shape(ROWS, streams.context, count, context_of(1000, count), 1000)))
    return found


def test_streams_that_grow_while_a_prompt_enters_do_not_lengthen_their_own_gaps() -> None:
    here = machine(3.0)
    here.prompt(4000)
    here.decode(50)
    assert max(growing(here, CONTEXT // ROWS, 50)) < 1.1 * 3.0 * here.calm_s()


def test_a_load_that_never_pauses_is_paced_by_its_streams_as_they_are() -> None:
    here = machine(3.0)
    here.prompt(4000)
    here.decode(50)
    growing(here, CONTEXT // ROWS, 50)
    for _ in range(4000):
        growing(here, 1300, 1)
    assert growing(here, 1300, 1)[0] > 0.9 * 3.0 * here.calm_s(ROWS, ROWS * 1300)


def test_what_other_streams_were_is_forgotten_when_nobody_decodes() -> None:
    here = machine(3.0)
    here.decode(50)
    here.prompt(8000)
    assert growing(here, 1300, 5)[-1] > 0.9 * 3.0 * here.calm_s(ROWS, ROWS * 1300)


@settings(max_examples=20)
@given(st.floats(0.03, 0.2), st.sampled_from([0.0001, 0.0005, 0.002]))
def test_a_target_of_ones_own_is_held_whatever_a_token_costs(target_s: float, token_s: float) -> None:
    here = machine(itl_target_s=target_s, token_s=token_s)
    here.prompt(4000)
    here.decode(50)
    gaps = [seconds for _, seconds in here.prompt(4000, ROWS)]
    floor_s = here.calm_s() + LEAST_TOKENS * token_s * 2
    assert max(gaps) < 1.15 * max(target_s, (1 + LEAST_SHARE) * here.calm_s(), floor_s)


def test_an_impossible_target_leaves_prompts_a_third_of_the_time() -> None:
    here = machine(itl_target_s=0.001)
    alone_s = total_s(here.prompt(4000))
    here.decode(50)
    assert total_s(here.prompt(4000, ROWS)) < 3.4 * alone_s


def test_one_stray_step_does_not_shrink_the_next_ones() -> None:
    here = machine(3.0)
    here.prompt(4000)
    here.decode(50)
    counts = [count for count, _ in here.prompt(2000, ROWS, stray=5)]
    assert min(counts[6:9]) > 0.75 * counts[4]


@pytest.mark.parametrize("slower", [3.0, 0.4])
def test_a_machine_that_changes_its_speed_is_followed_within_six_steps(slower: float) -> None:
    here = machine(2.8)
    here.prompt(4000)
    here.decode(50)
    here.slower = slower
    gaps = [seconds / here.calm_s() for _, seconds in here.prompt(3000, ROWS)]
    assert max(gaps[6:]) < 1.1 * 2.8
    assert min(gaps[6:-1]) > 0.8 * 2.8


@settings(max_examples=20)
@given(st.floats(0.0002, 0.02))
def test_with_nobody_decoding_a_step_takes_half_a_second_at_most(token_s: float) -> None:
    here = machine(token_s=token_s)
    here.prompt(3000)
    steps = here.prompt(3000)
    assert max(seconds for _, seconds in steps) < 0.65
    full = [count for count, seconds in steps[:-1] if seconds > 0.3]
    assert len(full) >= len(steps) - 2, "the time was not used"


def test_pieces_grow_from_what_was_tried_and_end_at_the_most() -> None:
    here = machine(token_s=1e-6)
    counts = [count for count, _ in here.prompt(20_000)]
    assert counts[0] <= FIRST_TOKENS
    assert all(after <= 2 * max(before, FIRST_TOKENS) for before, after in pairwise(counts))
    assert max(counts) == 2048


def test_a_very_slow_machine_still_advances_by_a_block() -> None:
    here = machine(token_s=10.0)
    assert [count for count, _ in here.prompt(40)] == [LEAST_TOKENS, LEAST_TOKENS, 8]


def test_long_pieces_end_with_a_block_and_short_ones_give_nothing_away() -> None:
    here = machine()
    here.prompt(4000)
    budget = here.pace.budget(Streams(0, 0), 1)
    for start in range(0, 64, 5):
        assert (start + budget.fitting(start, 4000)) % BLOCK_TOKENS == 0
    budget.tokens = 30
    assert budget.fitting(5, 4000) == 27  # ends with a block
    assert budget.fitting(0, 4000) == 30  # a block's end would leave out half


def test_when_many_start_together_those_ahead_leave_the_others_the_time() -> None:
    """One decodes already, 31 prompts are still to come: what counts is the pace of all 32."""
    here = machine(2.8)
    here.prompt(4000)
    for rows in (1, 8, 16, 32) * 10:
        here.step(Shape(rows, 300 * rows))
    alone = here.pace.budget(Streams(1, 300), 2)
    crowd = here.pace.budget(Streams(1, 300), 32)
    assert crowd.fitting(0, 4000) > 4 * alone.fitting(0, 4000)
    assert crowd.seconds < 2.8 * here.calm_s(32, 32 * 300)


def test_short_prompts_pass_a_long_one_that_at_most_takes_twice_as_long(lab) -> None:
    """B12: one long prompt, then short ones without end; step counts, no clock."""
    engine = lab.engine(prefill_chunk=16)
    engine.submit(lab.plan("long", [3 + n % 90 for n in range(200)], max_tokens=1))
    engine.step()
    steps, first_token_at = 1, {}
    while "long" not in first_token_at:
        assert steps < 2 * 200 / 16 + 2
        short = f"short-{steps}"
        engine.submit(lab.plan(short, [5 + steps % 80, 7, 9, 11], max_tokens=1, cache_salt=short.encode()))
        for event in engine.step().events:
            if isinstance(event, TokensEvent):
                first_token_at[event.request_id] = steps
        steps += 1
    shorts = [at - int(name.partition("-")[2]) for name, at in first_token_at.items() if name != "long"]
    assert len(shorts) > 10
    assert max(shorts) <= 1, "a short prompt waited for the long one"
