"""Sequences that give way and come back (B13): the answer is the same, nobody starves, and the cheaper way is taken."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.admission import waiting_tokens
from gpu_worker.engine.api import ChoicePlan, Reason
from gpu_worker.engine.preemption import price
from gpu_worker.engine.swap import HostBuffer

HOST = 1 << 20  # more than any pool here


@pytest.fixture(scope="module", params=["torch_lab", "simulated_lab"])
def lab(request):
    """What is tested here is the engine's own work, so it holds for either."""
    return request.getfixturevalue(request.param)


def prompts(lab, count: int, low: int, high: int) -> list[list[int]]:
    """No two begin alike, so that none finds what another has computed."""
    rng = random.Random(count)
    return [[3 + at, *(rng.randrange(3, lab.vocab) for _ in range(rng.randint(low, high)))] for at in range(count)]


def swaps_always(engine) -> None:
    """As if computing were slow: whoever gives way is copied."""
    engine._schedule.holdings.rates = Slow()


class Slow:
    prefill_tokens_per_s = 1.0


@pytest.mark.parametrize("swap_bytes", [0, HOST])
def test_preemption_changes_neither_text_nor_usage(lab, answers, swap_bytes):
    """B13: eight requests, one on blocks from elsewhere, on a pool that holds about three; some give way twice."""
    plans = [lab.plan(f"r{i}", prompt, max_tokens=90) for i, prompt in enumerate(prompts(lab, 8, 10, 30))]
    plans[2] = lab.plan("r2", [90] * 40, max_tokens=90, fetched=(0, 2))
    wanted, small = lab.engine(blocks=256), lab.engine(blocks=10, swap_bytes=swap_bytes)
    swaps_always(small)
    fetched = fetched_blocks(lab, plans[2])
    for engine in (wanted, small):
        assert all(engine.transfer.load(key, payload) for key, payload in fetched.items())
        for plan in (plans[2], *plans[:2], *plans[3:]):
            engine.submit(plan)
    calm = lab.finish(wanted)
    times = finish_counting(lab, small, answers)
    ends = answers.ends
    assert answers.ids == calm.ids
    for key, end in ends.items():
        assert (end.reason, end.completion_tokens) == (Reason.LENGTH, 90)
        assert end.usage.completion_tokens == calm.ends[key].usage.completion_tokens
        assert end.usage.cached == calm.ends[key].usage.cached
    assert all(end.usage.recomputed_tokens == 0 for end in calm.ends.values())
    gave_way = small._schedule.preemption
    recomputed = sum(end.usage.recomputed_tokens for end in ends.values())
    assert len(times) > 2
    assert max(times.values()) > 1, "the test wants somebody to give way twice"
    assert (gave_way.swapped, recomputed > 0) == ((sum(times.values()), False) if swap_bytes else (0, True))


def finish_counting(lab, engine, answers) -> Counter[str]:
    """Step until idle; how often each request was seen to have given way."""
    times, before = Counter(), set()
    while engine.has_work():
        lab.step(engine, answers)
        gone = {one.request.plan.request_id for one in engine._schedule.waiting if one.reached}
        times.update(gone - before)
        before = gone
    assert engine.pool.used == 0
    return times


def fetched_blocks(lab, plan) -> dict[bytes, bytes]:
    """The prompt's whole blocks as another engine computed them; none where blocks have no content."""
    source = lab.engine()
    lab.answer(source, plan)
    keys = source.block_keys()[:2]
    found = {key: source.transfer.dump(key) for key in keys}
    return {key: bytes(payload) for key, payload in found.items() if payload is not None}


@given(
    blocks=st.integers(5, 12),
    chunk=st.sampled_from([5, 16, 64]),
    swap_bytes=st.sampled_from([0, 1 << 13, HOST]),
    shape=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), min_size=2, max_size=7),
    shared=st.integers(0, 40),
)
@settings(max_examples=40, deadline=None)
def test_in_every_step_some_sequence_advances_and_all_finish(simulated_lab, blocks, chunk, swap_bytes, shape, shared):
    lab = simulated_lab
    engine = lab.engine(blocks=blocks, prefill_chunk=chunk, swap_bytes=swap_bytes)
    longest = blocks * 16 - 1
    for number, (length, n) in enumerate(shape):
        prompt = ([5] * shared + [6 + number] * length)[: longest - 20]
        engine.submit(lab.plan(f"r{number}", prompt, max_tokens=20, choices=[ChoicePlan(i) for i in range(n)]))
    answers, before = lab.answers(), engine._meters.steps
    while engine.has_work():
        oldest = (engine._schedule.running or engine._schedule.waiting)[0]
        known, computed = len(oldest.ids), oldest.computed
        lab.step(engine, answers)
        assert oldest.ended or len(oldest.ids) > known or oldest.computed > computed, "the oldest stood still"
    assert engine._meters.steps > before
    assert len(answers.ids) == sum(n for _, n in shape)
    assert all(len(ids) == 20 for ids in answers.ids.values())
    assert engine._schedule.holdings.host.used == 0


def test_the_way_back_that_costs_less_is_taken():
    host = HostBuffer(100 * 1000, 1000)
    host.bytes_per_s = 1e6  # two milliseconds a block, there and back
    assert price(tokens=160, blocks=10, tokens_per_s=1e3, host=host).swap
    assert not price(tokens=160, blocks=10, tokens_per_s=1e6, host=host).swap
    assert price(tokens=160, blocks=10, tokens_per_s=1e6, host=host).seconds == pytest.approx(160e-6)
    assert not price(tokens=1600, blocks=101, tokens_per_s=1.0, host=host).swap, "there is no room"
    assert not price(tokens=160, blocks=10, tokens_per_s=1.0, host=HostBuffer(0, 1000)).swap
    assert price(tokens=0, blocks=0, tokens_per_s=1.0, host=host).seconds == 0


def test_who_has_least_to_lose_gives_way_and_never_the_oldest(lab):
    engine = lab.engine(blocks=16, prefill_chunk=64, swap_bytes=0)
    lengths = {"old": 3, "long": 60, "short": 20, "middle": 40}  # 1, 4, 2 and 3 blocks
    for number, (name, length) in enumerate(lengths.items()):
        engine.submit(lab.plan(name, [10 + number] * length, max_tokens=60))
    answers, schedule = lab.answers(), engine._schedule
    for _ in range(5):
        lab.step(engine, answers)
    assert len(schedule.running) == 4

    def victim(running) -> str:
        return schedule.preemption.victim(running).request.plan.request_id

    assert victim(schedule.running) == "short"
    assert victim([schedule.running[2], *schedule.running[:2], schedule.running[3]]) == "old"
    assert victim(schedule.running[2:]) == "middle"
    while not schedule.preemptions:
        lab.step(engine, answers)
    assert "short" in [one.request.plan.request_id for one in schedule.waiting]
    assert len(lab.finish(engine, answers).ids) == 4


@pytest.mark.parametrize("how", ["abort", "park", "stop"])
def test_a_swapped_sequence_that_leaves_frees_its_place_on_the_host(lab, how):
    engine = lab.engine(blocks=8, prefill_chunk=64, swap_bytes=HOST)
    swaps_always(engine)
    for number in range(4):
        engine.submit(lab.plan(f"r{number}", [10 + number] * 20, max_tokens=90))
    answers, host = lab.answers(), engine._schedule.holdings.host
    while not host.used:
        lab.step(engine, answers)
    swapped = next(one for one in engine._schedule.waiting if one.swapped)
    assert waiting_tokens([swapped]) == 1, "what is on the host is not to be computed"
    if how == "stop":
        engine.stop_choice(swapped.request.plan.request_id, 1, 0, 1)
    else:
        getattr(engine, how)(swapped.request.plan.request_id, 1)
    used = host.used
    lab.step(engine, answers)
    assert swapped.swapped is None
    assert host.used < used or how == "abort"
    lab.finish(engine, answers)
    assert host.used == 0


def test_a_swapped_sequence_whose_shared_beginning_has_gone_computes_again(torch_lab):
    """Its own blocks are on the host, but what it shared with a neighbour was evicted once the neighbour left."""
    lab, shared = torch_lab, [7] * 32
    plans = [lab.plan("one", [*shared, 8, 9], max_tokens=30), lab.plan("two", [*shared, 9, 8], max_tokens=30)]
    alone = {plan.request_id: lab.answer(lab.engine(), plan) for plan in plans}
    engine, answers = lab.engine(blocks=16, swap_bytes=HOST), lab.answers()
    for plan in plans:
        engine.submit(plan)
        for _ in range(4):
            lab.step(engine, answers)
    schedule = engine._schedule
    victim = schedule.running[1]
    schedule.running.remove(victim)
    assert schedule.holdings.swap_out(victim)
    assert victim.swapped.first == 2
    schedule.add(victim)
    engine.abort("one", 1)
    engine.pool.release([engine.pool.allocate() for _ in range(engine.pool.total)])
    assert not engine.pool.keys()
    lab.finish(engine, answers)
    assert answers.ids["two", 0] == alone["two"]
    assert answers.ends["two", 0].usage.recomputed_tokens > 0
