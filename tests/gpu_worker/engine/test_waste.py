"""What of the pool is held and used by no token: the last block of each sequence, and no more."""

import random

from gpu_worker.engine.api import ChoicePlan


def test_waste_is_at_most_four_percent_of_used_kv_in_a_mix_of_lengths(simulated_lab, answers, monkeypatch):
    """Prompts of 64 to 1,024 tokens, answers of 16 to 256, a fifth of the requests with three choices."""
    lab, rng = simulated_lab, random.Random(4)
    from gpu_worker.engine import simulated_engine

    facts = simulated_engine.ModelFacts("Tiny", lab.vocab, 4096, (lab.eos,))
    monkeypatch.setattr(simulated_engine, "facts_of", lambda folder: facts)
    engine = lab.engine(blocks=1200, max_sequences=32, max_waiting_tokens=1 << 20)
    for number in range(80):
        prompt = [rng.randrange(3, lab.vocab) for _ in range(rng.randint(64, 1024))]
        choices = [ChoicePlan(choice) for choice in range(3 if number % 5 == 0 else 1)]
        engine.submit(lab.plan(f"r{number}", prompt, max_tokens=rng.randint(16, 256), choices=choices))
    used = unwritten = 0.0
    while engine.has_work():
        load = lab.step(engine, answers).load
        used += load.used_blocks
        unwritten += load.used_blocks * load.kv.unwritten_ratio
    assert len(answers.ends) == 80 + 2 * 16
    assert 0 < unwritten / used <= 0.04


def test_what_is_unwritten_is_counted_slot_by_slot(simulated_lab, answers):
    engine = simulated_lab.engine()
    assert engine.step().load.kv.unwritten_ratio == 0
    engine.submit(simulated_lab.plan("a", list(range(3, 23))))  # 20 tokens in two blocks
    load = simulated_lab.step(engine, answers).load
    assert (load.used_blocks, load.kv.unwritten_ratio) == (2, 12 / 32)
    simulated_lab.finish(engine, answers)
    assert engine.step().load.kv.unwritten_ratio == 0


def test_the_load_tells_what_was_shared_copied_and_swapped(torch_lab, answers):
    lab = torch_lab
    engine = lab.engine(blocks=8, prefill_chunk=64, swap_bytes=1 << 20)
    engine._schedule.holdings.rates = type("Slow", (), {"prefill_tokens_per_s": 1.0})()
    choices = [ChoicePlan(choice) for choice in range(2)]
    engine.submit(lab.plan("n", [9] * 20, max_tokens=60, choices=choices))
    engine.submit(lab.plan("m", [8] * 20, max_tokens=60))
    lab.finish(engine, answers)
    kv = answers.steps[-1].load.kv
    block_bytes = engine._schedule.holdings.host.block_bytes
    assert kv.copied_blocks == 1
    assert kv.partial_hits >= 1
    assert (kv.recomputed_sequences, kv.swapped_sequences) == (0, engine._schedule.preemptions)
    assert kv.swapped_out_bytes >= kv.swapped_in_bytes >= block_bytes * kv.swapped_sequences > 0
    assert kv.swapped_out_bytes % block_bytes == 0
    assert kv.host_bytes == 0
    assert max(step.load.kv.host_bytes for step in answers.steps) > 0
