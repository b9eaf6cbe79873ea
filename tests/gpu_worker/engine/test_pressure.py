"""Thousands of requests on tiny pools (B16), and sequences that break (B25): nothing is lost, nobody else notices."""

import random
from dataclasses import replace

import pytest
import torch

from gpu_worker.engine.api import ChoicePlan, Reason

PROMPTS = [list(range(3, 3 + length)) for length in (1, 15, 16, 17, 40, 60)] + [[9, 8, 7] * 9]


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    """What is tested here is the engine's own work, so it holds for either."""
    return request.getfixturevalue(request.param)


def test_counts_never_drift_over_ten_thousand_short_requests(simulated_lab):
    """B16: shared prefixes, finishes and aborts mixed; at idle a prompt of full size still fits."""
    lab, rng = simulated_lab, random.Random(16)
    engine = lab.engine(blocks=20, max_sequences=16)
    pool, used = engine.pool, 0
    for i in range(10_000):
        prompt = [*PROMPTS[rng.randrange(len(PROMPTS))], 3 + i % 90]
        choices = [ChoicePlan(choice) for choice in range(1 + (i % 5 == 0))]
        engine.submit(lab.plan(f"r{i}", prompt, max_tokens=40 if i % 10 == 0 else 3, choices=choices))
        if i % 3 == 0:
            engine.abort(f"r{rng.randint(max(0, i - 9), i)}", 1)
        while engine._schedule.waiting[20:]:
            load = engine.step().load
            assert load.free_blocks + load.cached_blocks + load.used_blocks == load.total_blocks
            used = max(used, load.used_blocks)
        if i % 100 == 0:
            pool.check()
    assert engine._schedule.preemptions > 10, f"the test wants a pool that fills, not {used} of {pool.total}"
    lab.finish(engine)
    load = engine.step().load
    assert (load.used_blocks, load.committed_blocks, load.running) == (0, 0, [])
    assert len(lab.answer(engine, lab.plan("full", [5] * 250, max_tokens=6))) == 6
    blocks = [pool.allocate() for _ in range(pool.total)]
    assert sorted(blocks) == list(range(20)), "all that is cached can be evicted"


def test_counts_never_drift_over_many_short_requests(lab):
    """B16, on a pool so small that requests give way, with what computes."""
    rng = random.Random(16)
    engine = lab.engine(blocks=16, max_sequences=8)
    for i in range(300):
        prompt = PROMPTS[rng.randrange(len(PROMPTS))]
        engine.submit(
            lab.plan(f"r{i}", prompt, max_tokens=2, choices=[ChoicePlan(c) for c in range(rng.randint(1, 2))])
        )
        if rng.random() < 0.4:
            engine.step()
        if rng.random() < 0.3:
            engine.abort(f"r{rng.randint(max(0, i - 5), i)}", 1)
        engine.pool.check()
    lab.finish(engine)
    load = engine.step().load
    assert (load.used_blocks, load.committed_blocks, load.running) == (0, 0, [])
    assert len(lab.answer(engine, lab.plan("full", [5] * 250, max_tokens=6))) == 6


class Faulty:
    """A decoder that breaks on one token id, as a kernel might: by raising, or by writing NaN as its K and V."""

    def __init__(self, decoder, bad_token: int, how: str) -> None:
        self._decoder, self._bad_token, self._how = decoder, bad_token, how
        self.kv_shape = decoder.kv_shape

    def forward(self, batch, kv):
        bad = batch.token_ids == self._bad_token
        if self._how == "raise" and bad.any():
            raise RuntimeError("a kernel failed")
        logits = self._decoder.forward(batch, kv)
        rows = replace(batch, blocks=batch.blocks[bad], offsets=batch.offsets[bad])
        for layer in range(kv.shape.layers):
            kv.write(layer, rows, torch.full((1, 2, kv.shape.kv_heads, kv.shape.head_dim), torch.nan))
        return logits


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_sequence_that_breaks_a_step_ends_alone(plain_lab, answers, how):
    """B25: its neighbours in the same batch go on, and what it computed is found by nobody."""
    engine = plain_lab.engine(prefill_chunk=48)
    good = [plain_lab.plan(f"good{i}", [10 + i] * (12 + i), max_tokens=10) for i in range(2)]
    bad = plain_lab.plan("bad", [11] * 20 + [90] * 30, max_tokens=10)
    calm = {plan.request_id: plain_lab.answer(plain_lab.engine(), plan) for plan in [*good, bad]}
    healthy = engine._runner._decoder
    engine._runner._decoder = Faulty(healthy, 90, how)
    for plan in (good[0], bad, good[1]):
        engine.submit(plan)
    plain_lab.finish(engine, answers)
    end = answers.ends.pop(("bad", 0))
    assert (end.reason, end.completion_tokens) == (Reason.ERROR, 0)
    assert end.message
    assert answers.ids == {(plan.request_id, 0): calm[plan.request_id] for plan in good}
    engine._runner._decoder = healthy
    assert plain_lab.answer(engine, bad) == calm["bad"]


def test_the_blocks_of_a_broken_sequence_come_back_clean(plain_lab):
    plans = [plain_lab.plan(f"r{i}", [20 + i] * length, max_tokens=20) for i, length in enumerate((3, 40))]
    calm = {(plan.request_id, 0): plain_lab.answer(plain_lab.engine(), plan) for plan in plans}
    engine = plain_lab.engine(blocks=8)
    healthy = engine._runner._decoder
    engine._runner._decoder = Faulty(healthy, 90, "nan")
    engine.submit(plain_lab.plan("bad", [90] * 120))
    assert plain_lab.finish(engine).ends["bad", 0].reason == Reason.ERROR
    engine._runner._decoder = healthy
    for plan in plans:
        engine.submit(plan)
    assert plain_lab.finish(engine).ids == calm  # decoded together, masked where the shorter one has nothing


def test_prompt_tokens_count_once_however_they_are_cut_and_recomputed_ones_apart(lab, answers):
    prompts = {f"r{i}": [10 + i] * 33 for i in range(3)}
    # A last piece of one token, and not enough blocks for all.
    engine = lab.engine(blocks=7, prefill_chunk=32, swap_bytes=0)
    for name, prompt in prompts.items():
        engine.submit(lab.plan(name, prompt, max_tokens=40))
    lab.finish(engine, answers)
    assert answers.steps[-1].load.preemptions
    assert sum(step.prompt_tokens for step in answers.steps) == 3 * 33
    recomputed = sum(end.usage.recomputed_tokens for end in answers.ends.values())
    assert sum(step.recomputed_tokens for step in answers.steps) == recomputed > 0
