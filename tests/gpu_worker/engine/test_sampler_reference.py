"""The sampler against a plain reference in float64, and rows against themselves in other company."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.counted_random import uniform
from gpu_worker.engine.rows import Row
from gpu_worker.engine.sampler import sample
from mesh.sampling import Sampling

VOCAB = 700
LARGE = 49_152
NEAR = 1e-4  # how far from an edge, in shares of probability, the two may disagree for their rounding's sake


@st.composite
def samplings(draw) -> Sampling:
    """Every field that the sampler reads, most of them off."""

    def maybe(strategy, off):
        return draw(st.one_of(st.just(off), strategy))

    tokens = st.integers(0, VOCAB - 1)
    return Sampling(
        max_tokens=50,
        temperature=maybe(st.floats(0.05, 2.0), 0.0),
        top_k=maybe(st.integers(1, VOCAB + 5), 0),
        top_p=maybe(st.floats(0.01, 1.0), 1.0),
        min_p=maybe(st.floats(0.0, 0.9), 0.0),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        repetition_penalty=maybe(st.floats(0.1, 2), 1.0),
        logit_bias=maybe(st.dictionaries(tokens, st.floats(-100, 100), max_size=4), {}),
        min_tokens=maybe(st.integers(1, 20), 0),
        stop_token_ids=maybe(st.tuples(tokens, tokens), ()),
        top_logprobs=maybe(st.integers(0, 20), None),
    )


histories = st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
                      st.lists(st.integers(0, VOCAB - 1), max_size=20))  # fmt: skip


def row_of(sampling: Sampling, history, choice: int = 0) -> Row:
    prompt, output = history
    return Row(sampling, choice, [*prompt, *output], len(prompt), (*sampling.stop_token_ids, 2))


def logits_of(seed: int, spread: float, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def adjusted(logits: np.ndarray, sampling: Sampling, history) -> np.ndarray:
    """Penalties, bias and minimum length by the letter of docs/api.md."""
    prompt, output = history
    x = logits.astype(np.float64)
    for token in {*prompt, *output}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token, times in Counter(output).items():
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    if len(output) < sampling.min_tokens:
        x[[*sampling.stop_token_ids, 2]] = -math.inf
    return x


def shares(x: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What each token has a chance of, truncation included."""
    p = np.exp((x - x.max()) / sampling.temperature)
    p /= p.sum()
    for kept in (_likeliest(p, sampling.top_k), _nucleus):
        p = np.where(kept(p, sampling) if kept is _nucleus else kept, p, 0)
        p /= p.sum()
    return np.where(p >= sampling.min_p * p.max(), p, 0)


def _likeliest(p: np.ndarray, k: int) -> np.ndarray:
    return p >= np.sort(p)[-min(k, len(p))] if k else np.ones(len(p), bool)


def _nucleus(p: np.ndarray, sampling: Sampling) -> np.ndarray:
    order = np.sort(p)[::-1]
    reached = np.flatnonzero(order.cumsum() >= sampling.top_p * (1 - 1e-12))
    return p >= (order[reached[0]] if len(reached) else 0)


def on_an_edge(x: np.ndarray, sampling: Sampling) -> bool:
    """Whether a hair's breadth more or less of a parameter keeps other tokens: then rounding may decide."""
    kept = [
        shares(x, replace(sampling, top_p=min(1.0, sampling.top_p * a), min_p=sampling.min_p * b)) > 0
        for a in (1 - NEAR, 1 + NEAR)
        for b in (1 - NEAR, 1 + NEAR)
    ]
    return any((kept[0] != other).any() for other in kept)


@settings(max_examples=400, deadline=None)
@given(samplings(), histories, st.integers(0, 2**32), st.sampled_from([0.5, 3.0, 12.0]), st.integers(0, 3))
def test_a_token_is_the_one_that_the_reference_chooses(sampling, history, seed, spread, choice):
    logits = logits_of(seed, spread)
    [sampled] = sample(torch.from_numpy(logits.copy())[None], [row_of(sampling, history, choice)])
    x = adjusted(logits, sampling, history)
    if sampling.temperature == 0:
        assert x[sampled.token] >= x.max() - 1e-4
        return
    p = shares(x, sampling)
    if on_an_edge(x, sampling):
        return
    cumulative = p.cumsum() / p.sum()
    number = uniform(sampling.seed, choice, len(history[1]))
    below = cumulative[sampled.token - 1] if sampled.token else 0.0
    assert p[sampled.token] > 0
    assert below - NEAR <= number <= cumulative[sampled.token] + NEAR


@settings(max_examples=100, deadline=None)
@given(samplings(), histories, st.integers(0, 2**32), st.integers(0, 20))
def test_log_probabilities_are_the_models_own_whatever_changed_the_choice(sampling, history, seed, count):
    logits = logits_of(seed, 3.0)
    asked = replace(sampling, top_logprobs=count)
    [sampled] = sample(torch.from_numpy(logits.copy())[None], [row_of(asked, history)])
    x = logits.astype(np.float64)
    wanted = x - x.max() - np.log(np.exp(x - x.max()).sum())
    assert abs(sampled.logprob.logprob - wanted[sampled.token]) < 1e-5
    assert [token for token, _ in sampled.logprob.top] == np.argsort(-logits, kind="stable")[:count].tolist()
    assert all(abs(value - wanted[token]) < 1e-5 for token, value in sampled.logprob.top)
    silent = replace(sampling, top_logprobs=None)
    [unasked] = sample(torch.from_numpy(logits.copy())[None], [row_of(silent, history)])
    assert unasked.token == sampled.token, "asking for log-probabilities changes nothing"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(samplings(), histories, st.integers(0, 2**32)), min_size=2, max_size=8), st.randoms())
def test_a_row_is_the_same_to_the_bit_whatever_shares_its_batch(asked, chance):
    def results(order: list[int]) -> dict[int, object]:
        logits = torch.from_numpy(np.stack([logits_of(asked[i][2], 3.0) for i in order]))
        rows = [row_of(*asked[i][:2]) for i in order]
        return dict(zip(order, sample(logits, rows), strict=True))

    everyone = list(range(len(asked)))
    together = results(everyone)
    chance.shuffle(everyone)
    assert results(everyone) == together
    half = everyone[: len(everyone) // 2]
    assert results(half) == {i: together[i] for i in half}
    assert {i: results([i])[i] for i in everyone} == together


@settings(max_examples=40, deadline=None)
@given(samplings(), histories, st.integers(0, 2**32))
def test_a_row_that_followed_its_answer_and_one_made_anew_are_the_same(sampling, history, seed):
    prompt, output = history
    followed = row_of(sampling, (prompt, []))
    for token in output:
        sample(torch.from_numpy(logits_of(seed, 3.0))[None], [followed])
        followed.ids.append(token)
    logits = torch.from_numpy(logits_of(seed, 3.0))[None]
    assert sample(logits.clone(), [followed]) == sample(logits.clone(), [row_of(sampling, history)])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 4.0]), st.floats(0.05, 0.999), st.integers(0, 300))
def test_a_vocabulary_of_a_real_models_size_is_truncated_alike(seed, spread, top_p, top_k):
    """Here blocks and the first guess at the nucleus matter."""
    logits = logits_of(seed, spread, LARGE)
    sampling = Sampling(max_tokens=5, seed=seed, top_p=top_p, top_k=top_k)
    x = logits.astype(np.float64)
    p = shares(x, sampling)
    cumulative = p.cumsum() / p.sum()
    for position in range(3):
        row = row_of(sampling, ([1], [1] * position))
        [sampled] = sample(torch.from_numpy(logits.copy())[None], [row])
        below = cumulative[sampled.token - 1] if sampled.token else 0.0
        assert below - NEAR <= uniform(seed, 0, position) <= cumulative[sampled.token] + NEAR


def test_precomputed_likeliest_tokens_serve_the_rows_that_need_no_more():
    logits = torch.from_numpy(np.stack([logits_of(n, 3.0) for n in range(4)]))
    logits[2, 5] = math.nan
    plain, drawn = Sampling(max_tokens=5, temperature=0.0, seed=1), Sampling(max_tokens=5, temperature=1.0, seed=1)
    rows = [row_of(sampling, ([1], [])) for sampling in (plain, drawn, plain, plain)]
    greedy = (logits.argmax(-1).tolist(), [True, True, False, True])
    assert sample(logits.clone(), rows, greedy) == sample(logits.clone(), rows)
    assert sample(logits.clone(), rows, greedy)[2] is None
