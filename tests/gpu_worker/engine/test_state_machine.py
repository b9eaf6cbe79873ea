"""Random traffic on tiny pools (B13, B16): arrivals, departures, faults and loaded blocks in any order.

After every step each block is in one state, held by exactly those that list it, and written by one only; host memory
holds what is swapped and nothing else. Whoever was left alone gets the answer of an engine that had nothing else to do.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gpu_worker.engine.api import ChoicePlan, Reason
from mesh.blocks import BLOCK_TOKENS

COMMON = list(range(3, 63))
# Prefixes of each other, and two that part from them inside a block.
PROMPTS = [COMMON[:length] for length in (1, 15, 16, 17, 40, 60)]
PROMPTS += [[9, 8, 7] * 9, [*COMMON[:21], 80, *COMMON[22:50]]]
OUTPUT = 20


class Breaking:
    """A runner whose steps fail where they hold certain requests, or altogether."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.bad, self.dead = set(), False

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, pieces, ending_ids):
        if self.dead or any(piece.sequence.request.plan.request_id in self.bad for piece in pieces):
            raise RuntimeError("a kernel failed")
        return self._runner.run(pieces, ending_ids)


class Alone:
    """What each plan answers with an engine to itself, and the blocks of all prompts."""

    def __init__(self, lab) -> None:
        self._lab = lab
        self._ids = {}
        source = lab.engine()
        for number, prompt in enumerate(PROMPTS):
            lab.answer(source, lab.plan(f"p{number}", prompt))
        found = {key: source.transfer.dump(key) for key in source.block_keys()}
        self.blocks = [(key, bytes(payload)) for key, payload in found.items() if payload is not None]

    def ids(self, which: int, temperature: float, choice: int) -> list[int]:
        asked = (which, temperature, choice)
        if asked not in self._ids:
            options = {"max_tokens": OUTPUT, "temperature": temperature, "choices": [ChoicePlan(choice)]}
            self._ids[asked] = self._lab.answer(self._lab.engine(), self._lab.plan("r", PROMPTS[which], **options))
        return self._ids[asked]


def check(engine) -> None:
    """The engine's blocks and host memory are in order. Raises AssertionError."""
    schedule, pool = engine._schedule, engine.pool
    pool.check()
    held = Counter(block for one in schedule.running for block in one.blocks)
    assert held == Counter({block: pool.holders(block) for block in held})
    assert len(held) == pool.used
    assert not any(one.blocks for one in schedule.waiting)
    assert not any(one.swapped for one in schedule.running)
    for one in schedule.running:
        at, offset = divmod(one.computed, BLOCK_TOKENS)
        assert all(pool.writable(block, offset if block == one.blocks[at] else 0) for block in one.blocks[at:])
    slots = [slot for one in schedule.waiting if one.swapped for slot in one.swapped.slots]
    assert len(slots) == len(set(slots)) == schedule.holdings.host.used


def machine(lab, alone):
    class Traffic(RuleBasedStateMachine):
        @initialize(
            blocks=st.integers(6, 14),
            chunk=st.sampled_from([5, 16, 64]),
            most=st.integers(1, 5),
            swap_blocks=st.sampled_from([0, 3, 100]),
            slow=st.booleans(),
        )
        def start(self, blocks, chunk, most, swap_blocks, slow):
            block_bytes = lab.engine()._schedule.holdings.host.block_bytes
            options = {"blocks": blocks, "prefill_chunk": chunk, "max_sequences": most}
            self.engine = lab.engine(swap_bytes=swap_blocks * block_bytes, **options)
            self.engine._runner = self.runner = Breaking(self.engine._runner)
            if slow:  # copying then always looks cheaper than computing
                self.engine._schedule.holdings.rates = Slow()
            self.answers, self.most = lab.answers(), most
            self.plans, self.gone = {}, set()

        @rule(
            which=st.integers(0, len(PROMPTS) - 1),
            n=st.integers(1, 3),
            temperature=st.sampled_from([0.0, 1.5]),
            steps=st.integers(0, 6),
            bad=st.sampled_from([False] * 7 + [True]),
        )
        def submit(self, which, n, temperature, steps, bad):
            request_id, n = f"r{len(self.plans)}", min(n, self.most)
            self.plans[request_id] = (which, temperature, n)
            if bad:
                self.runner.bad.add(request_id)
                self.gone.add(request_id)
            options = {"max_tokens": OUTPUT, "temperature": temperature}
            choices = [ChoicePlan(i) for i in range(n)]
            self.engine.submit(lab.plan(request_id, PROMPTS[which], choices=choices, **options))
            self.step(steps)

        @rule(steps=st.integers(1, 12))
        def step(self, steps):
            for _ in range(steps):
                lab.step(self.engine, self.answers)
                check(self.engine)

        @rule(data=st.data(), how=st.sampled_from(["abort", "park"]))
        def leave(self, data, how):
            if self.plans:
                request_id = data.draw(st.sampled_from(sorted(self.plans)))
                getattr(self.engine, how)(request_id, 1)
                self.gone.add(request_id)

        @rule(data=st.data(), choice=st.integers(0, 2))
        def stop(self, data, choice):
            if self.plans:
                request_id = data.draw(st.sampled_from(sorted(self.plans)))
                self.engine.stop_choice(request_id, 1, choice, 1)
                self.gone.add(request_id)

        @rule()
        def fail_altogether(self):
            self.runner.dead = True
            self.step(1)
            self.runner.dead = False
            self.gone |= {id_ for (id_, _), end in self.answers.ends.items() if end.reason == Reason.ERROR}

        @rule(numbers=st.lists(st.integers(0, 40), max_size=4))
        def load(self, numbers):
            for number in numbers:
                if number < len(alone.blocks):
                    self.engine.transfer.load(*alone.blocks[number])

        @invariant()
        def all_is_in_order(self):
            if hasattr(self, "engine"):
                check(self.engine)

        def teardown(self):
            if not hasattr(self, "engine"):
                return
            lab.finish(self.engine, self.answers)
            check(self.engine)
            for request_id, (which, temperature, n) in self.plans.items():
                for choice in range(n):
                    whole, got = alone.ids(which, temperature, choice), self.answers.ids.get((request_id, choice), [])
                    assert got == (whole[: len(got)] if request_id in self.gone else whole)
            assert_all_can_be_had(lab, self.engine)

    return Traffic


class Slow:
    prefill_tokens_per_s = 1e-3


def assert_all_can_be_had(lab, engine) -> None:
    """At idle every block can be allocated, and a request as large as the pool takes still runs."""
    pool = engine.pool
    assert (pool.used, engine._schedule.holdings.host.used) == (0, 0)
    full = lab.plan("full", [5] * (engine.info.context_tokens - 6), max_tokens=6)
    assert len(lab.answer(engine, full)) == 6
    blocks = [pool.allocate() for _ in range(pool.total)]
    assert sorted(blocks) == list(range(pool.total))
    pool.release(blocks)
    assert pool.free == pool.total


@pytest.mark.parametrize("name", ["torch_lab", "simulated_lab"])
def test_random_traffic_on_a_tiny_pool_answers_as_if_undisturbed(request, name):
    lab = request.getfixturevalue(name)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    examples, steps = (25, 15) if name == "torch_lab" else (60, 25)
    run_state_machine_as_test(
        machine(lab, Alone(lab)),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks
        ),
    )
