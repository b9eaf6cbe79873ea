"""The sampler alone, on logits made by hand."""

import math
from collections import Counter

import pytest
import torch

from gpu_worker.engine.counted_random import uniform
from gpu_worker.engine.rows import Row
from gpu_worker.engine.sampler import sample
from mesh.sampling import Sampling

PINNED = [0.13870941014555427, 0.10584086659863745, 0.949559987972549]
LOGITS = [2.0, 1.0, 0.0, -1.0, -2.0]


def row(position: int = 0, choice: int = 0, prompt=(1,), output=None, ending_ids=(), **options) -> Row:
    """`output` is what the choice has said; if not given, `position` tokens that matter to nobody."""
    options = {"max_tokens": 100, "seed": 3} | options
    output = [4] * position if output is None else output
    return Row(Sampling(**options), choice, [*prompt, *output], len(prompt), ending_ids)


def drawn(count: int = 4000, logits=LOGITS, **options) -> dict[int, float]:
    """Shares of each token over many positions."""
    rows = [row(position=i, **options) for i in range(count)]
    tokens = Counter(result.token for result in sample(torch.tensor(logits).repeat(count, 1), rows))
    return {token: times / count for token, times in tokens.items()}


def one(logits=LOGITS, **options) -> int:
    return sample(torch.tensor([logits]), [row(**options)])[0].token


def test_uniform_is_even_and_differs_in_each_argument():
    numbers = [uniform(seed, choice, position) for seed in range(10) for choice in range(10) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert all(0 <= number < 1 for number in numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(abs(times - 1000) < 150 for times in tenths.values())


def test_uniform_never_changes():
    """Pinned: a request that moves between workers of two versions must keep its answer."""
    assert [uniform(0, 0, 0), uniform(42, 1, 7), uniform(2**64 - 1, 3, 9)] == PINNED


def test_random_shares_follow_the_softmax():
    wanted = torch.tensor(LOGITS).softmax(-1).tolist()
    shares = drawn(temperature=1.0)
    assert all(abs(shares[token] - p) < 0.03 for token, p in enumerate(wanted))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.1}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.3}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
    ],
)
def test_truncation_keeps_the_likeliest(options, kept):
    assert set(drawn(temperature=1.0, **options)) == kept


def test_top_p_over_a_flat_distribution_sorts_the_whole_vocabulary():
    logits = torch.zeros(1, 4000)
    logits[0, :10] = 1e-3
    rows = [row(position=i, temperature=1.0, top_p=0.5) for i in range(200)]
    tokens = {result.token for result in sample(logits.repeat(200, 1), rows)}
    assert max(tokens) > 1000  # ties at the edge come along


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-300, 1e-4])
def test_cold_sampling_is_greedy_and_a_number(temperature):
    assert one(temperature=temperature) == 0
    assert one([-1e30, -2e30, -math.inf], temperature=temperature) == 0


def test_penalties_and_bias_move_the_choice():
    assert one(temperature=0.0, logit_bias={4: 100.0}) == 4
    assert one(temperature=0.0, presence_penalty=1.5, output=[0]) == 1
    assert one(temperature=0.0, frequency_penalty=0.6, output=[0]) == 0
    assert one(temperature=0.0, frequency_penalty=0.6, output=[0, 0]) == 1
    assert one([2.0, 1.9], temperature=0.0, repetition_penalty=1.2, prompt=[0]) == 1
    assert one([-1.0, -1.1], temperature=0.0, repetition_penalty=1.2, prompt=[0]) == 1


def test_endings_wait_for_min_tokens():
    assert one(temperature=0.0, min_tokens=3, position=2, ending_ids=(0, 1)) == 2
    assert one(temperature=0.0, min_tokens=3, position=3, ending_ids=(0, 1)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_usable_numbers_fails_alone(bad, temperature):
    broken = [bad] * 5 if bad == -math.inf else [0.0, bad, 0.0, 0.0, 0.0]
    results = sample(torch.tensor([LOGITS, broken, LOGITS]), [row(temperature=temperature) for _ in range(3)])
    alone = one(temperature=temperature)
    assert results[1] is None
    assert [results[0].token, results[2].token] == [alone, alone]


def test_greedy_random_and_adjusted_rows_share_a_batch():
    rows = [row(temperature=0.0), row(temperature=1.0, position=5), row(temperature=0.0, logit_bias={3: 50.0})]
    together = [result.token for result in sample(torch.tensor([LOGITS] * 3), rows)]
    assert together == [sample(torch.tensor([LOGITS]), [single])[0].token for single in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_penalty_leaves_the_range_of_numbers_fails_alone(temperature):
    logits = torch.tensor([LOGITS, LOGITS])
    overflowing = row(temperature=temperature, repetition_penalty=1e-39, prompt=[0])
    results = sample(logits, [overflowing, row(temperature=temperature)])
    assert results[0] is None
    assert results[1] is not None


def test_the_highest_number_draws_the_last_token_with_a_share(monkeypatch):
    monkeypatch.setattr("gpu_worker.engine.sampler.uniform", lambda *_: 1 - 2**-53)
    assert one(temperature=1.0) == 4
    assert one(temperature=1.0, top_k=2) == 1
    assert one([0.0] * 50_000 + [-math.inf] * 3, temperature=1.0) == 49_999
