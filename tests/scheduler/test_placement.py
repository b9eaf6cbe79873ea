"""Which worker a request goes to, and which have room at all."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler.breaker import BreakerPolicy
from scheduler.charges import Pending
from scheduler.demand import Pins
from scheduler.placement import (
    AFFINITY,
    LEAST_LOADED,
    LEAST_TIME,
    Ask,
    Placement,
    PlacementPolicy,
    limits_of,
    never_fits,
    place,
    roomiest,
    serving,
)
from scheduler.prefixes import Tier
from scheduler.registry import Registry
from scheduler.reports import BlockChange

POLICY = PlacementPolicy()
KEYS = tuple(bytes([i]) * 16 for i in range(8))


@pytest.fixture
def workers() -> Registry:
    return Registry(BreakerPolicy(), unclaimed_after_s=10, slots=2)


@pytest.fixture
def add(workers, make):
    """Attach a worker that has reported; load and hello fields by name."""

    def add(worker_id: str, hello: dict | None = None, pins: Pins = make.pins, **load):
        worker = workers.attach(make.hello(worker_id, pins, **(hello or {})), len(workers) + 1, now=0)
        workers.report(worker, make.load(**load), now=0)
        return worker

    return add


@pytest.fixture
def ask(make) -> Ask:
    return Ask(make.pins, prefill_tokens=128, blocks=10, span_tokens=256)


def placed(ask: Ask, workers: Registry, now: float = 0) -> Placement | None:
    return place(ask, workers, POLICY, now, np.zeros(len(workers.rows), bool))


def chosen(ask: Ask, workers: Registry, now: float = 0) -> str | None:
    placement = placed(ask, workers, now)
    return workers.at(placement.slot).hello.worker_id if placement else None


def test_the_worker_with_the_least_expected_time_gets_it(add, ask, workers) -> None:
    add("slow", prefill_tokens_per_s=500.0)
    add("busy", prefill_tokens_per_s=2_000.0, queued_prefill_tokens=500)
    add("fast", prefill_tokens_per_s=1_000.0)
    placement = placed(ask, workers)
    assert placement is not None
    assert [c.worker_id for c in placement.candidates] == ["fast", "slow", "busy"]
    assert [c.expected_ms for c in placement.candidates] == pytest.approx([128, 256, 314])
    assert placement.reason == LEAST_TIME


def test_charges_that_no_report_shows_yet_count_as_queued(add, ask, workers) -> None:
    charged, other = add("charged"), add("other", queued_prefill_tokens=100)
    assert chosen(ask, workers) == "charged"
    workers.set_pending(charged, Pending(prefill_tokens=200, blocks=1, sequences=1))
    assert chosen(ask, workers) == "other"
    workers.set_pending(other, Pending(prefill_tokens=150, blocks=1, sequences=1))
    assert chosen(ask, workers) == "charged"


def test_leading_cached_blocks_are_credited_and_later_ones_are_not(add, ask, workers) -> None:
    add("tail", blocks=(BlockChange(Tier.DEVICE, KEYS[1:]),))
    add("head", blocks=(BlockChange(Tier.DEVICE, KEYS[:4]),))
    placement = placed(replace(ask, keys=KEYS), workers)
    assert placement is not None
    assert workers.at(placement.slot).hello.worker_id == "head"
    assert placement.uncached_tokens == 128 - 64
    assert placement.candidates[0].cached_tokens == (64, 0, 0)


def test_a_fully_cached_prompt_still_computes_its_last_token(add, ask, workers) -> None:
    add("warm", blocks=(BlockChange(Tier.DEVICE, KEYS),))
    placement = placed(replace(ask, keys=KEYS), workers)
    assert placement is not None
    assert placement.uncached_tokens == 1


def test_a_slower_tier_is_credited_only_where_it_beats_computing(add, ask, workers) -> None:
    host = (BlockChange(Tier.HOST, KEYS),)
    add("unknown", blocks=host)
    add("slow", blocks=host, tier_tokens_per_s={Tier.HOST: 500.0})
    add("quick", blocks=host, tier_tokens_per_s={Tier.HOST: 10_000.0})
    placement = placed(replace(ask, keys=KEYS), workers)
    assert placement is not None
    assert [c.worker_id for c in placement.candidates] == ["quick", "unknown", "slow"]
    assert placement.candidates[0].expected_ms == pytest.approx(12.8 + 1)


def test_equals_go_by_session_then_by_load(add, ask, workers) -> None:
    add("loaded", sequences=3)
    add("calm", sequences=1, prefill_tokens_per_s=999.0)
    placement = placed(ask, workers)
    assert placement is not None
    assert (placement.candidates[1].worker_id, placement.reason) == ("calm", LEAST_LOADED)
    assert workers.at(placement.slot).hello.worker_id == "calm"
    assert chosen(replace(ask, home="loaded"), workers) == "loaded"
    assert placed(replace(ask, home="loaded"), workers).reason == AFFINITY


def test_a_session_does_not_hold_a_request_on_a_busy_worker(add, ask, workers) -> None:
    add("home", queued_prefill_tokens=200)
    add("idle")
    assert chosen(replace(ask, home="home"), workers) == "idle"


@pytest.mark.parametrize(
    "load",
    [
        {"queued_prefill_tokens": 300},
        {"committed_blocks": 247},
        {"sequences": 12},
        {"draining": True},
        {"healthy": False},
        {"refuses": True},
    ],
)
def test_a_worker_without_room_gets_nothing_until_a_report_says_otherwise(add, ask, workers, make, load) -> None:
    worker = add("w1", **load)
    assert chosen(ask, workers) is None
    workers.report(worker, make.load(seq=2), now=0)
    assert chosen(ask, workers) == "w1"


@pytest.mark.parametrize(("prefills", "prompt_tokens", "there"), [(1, 200, "w1"), (1, 400, None), (2, 200, None)])
def test_one_long_prompt_does_not_close_a_worker_to_short_ones(
    add, ask, workers, prefills, prompt_tokens, there
) -> None:
    add("w1", queued_prefill_tokens=7_000, prefilling_sequences=prefills)
    assert chosen(replace(ask, prefill_tokens=prompt_tokens), workers) == there


def test_a_worker_that_refused_has_no_room_until_its_next_report(add, ask, workers, make) -> None:
    worker = add("w1")
    workers.set_full(worker)
    assert chosen(ask, workers) is None
    workers.report(worker, make.load(seq=2), now=0)
    assert chosen(ask, workers) == "w1"


def test_a_worker_that_was_not_heard_of_lately_gets_nothing(add, ask, workers) -> None:
    add("w1")
    assert chosen(ask, workers, now=POLICY.stale_s) == "w1"
    assert chosen(ask, workers, now=POLICY.stale_s + 0.1) is None


def test_a_worker_has_no_room_before_its_first_load(ask, workers, make) -> None:
    workers.attach(make.hello("w1"), 1, now=0)
    assert chosen(ask, workers) is None


@pytest.mark.parametrize(
    ("wanted", "served"),
    [
        ({}, True),
        ({"model": "other"}, False),
        ({"pool": "other"}, False),
        ({"adapter": "lora"}, False),
        ({"tokenizer_digest": b"x"}, False),
        ({"model_digest": b"m"}, True),
        ({"model_digest": b"x"}, False),
        ({"precision": "fp32"}, True),
        ({"precision": "int8"}, False),
        ({"features": frozenset({"logprobs"})}, True),
        ({"features": frozenset({"logprobs", "grammar"})}, False),
    ],
)
def test_every_pin_must_match(add, ask, workers, make, wanted, served) -> None:
    is_ = replace(make.pins, model_digest=b"m", precision="fp32", features=frozenset({"logprobs"}))
    add("w1", pins=is_)
    assert (chosen(replace(ask, pins=replace(make.pins, **wanted)), workers) == "w1") is served


def test_avoided_workers_get_nothing_and_their_fault_domain_is_left_if_another_has_room(add, ask, workers) -> None:
    add("failed", hello={"fault_domain": "rack1"})
    near = add("near", hello={"fault_domain": "rack1"})
    far = add("far", hello={"fault_domain": "rack2"}, queued_prefill_tokens=200)
    retry = replace(ask, avoid=frozenset({"failed"}), avoid_domains=frozenset({"rack1"}))
    assert chosen(retry, workers) == "far"
    workers.set_full(far)
    assert chosen(retry, workers) == "near"
    workers.set_full(near)
    assert chosen(retry, workers) is None
    assert serving(retry, workers).sum() == 2


def test_a_request_larger_than_the_pool_runs_when_it_has_the_pool_to_itself(add, ask, workers, make) -> None:
    worker = add("w1", committed_blocks=1)
    many_choices = replace(ask, blocks=1_000)
    assert chosen(many_choices, workers) is None
    workers.report(worker, make.load(seq=2), now=0)
    assert chosen(many_choices, workers) == "w1"


@pytest.mark.parametrize(
    ("prompt", "most", "field"),
    [(2047, 1, None), (2047, 2, "max_tokens"), (2048, 1, "prompt"), (10, 2039, "max_tokens"), (9_999, 9, "prompt")],
)
def test_what_can_never_fit_is_told_which_field_to_change(add, workers, make, prompt, most, field) -> None:
    add("small", hello={"context_tokens": 512})
    add("large", hello={"context_tokens": 2048})
    demand = make.demand(prompt_tokens=prompt, max_tokens=most, expected_tokens=1)
    error = never_fits(demand, limits_of(demand.pins, demand.choices, workers))
    assert (error.field if error else None) == field


def test_choices_and_length_must_fit_the_same_worker(add, workers, make) -> None:
    add("wide", hello={"context_tokens": 512, "max_sequences": 16})
    add("long", hello={"context_tokens": 2048, "max_sequences": 4})

    def field(choices: int, most: int) -> str | None:
        demand = make.demand(choices=choices, max_tokens=most)
        error = never_fits(demand, limits_of(demand.pins, choices, workers))
        return error.field if error else None

    assert field(17, 1) == "choices"
    assert field(16, 1_000) == "max_tokens"
    assert field(16, 100) is None
    assert field(4, 1_000) is None


def test_a_worker_gets_no_more_choices_than_it_runs_at_once(add, ask, workers) -> None:
    add("narrow", hello={"max_sequences": 2})
    assert chosen(replace(ask, choices=3), workers) is None
    assert roomiest(replace(ask, choices=3), workers, POLICY, 0) is None
    add("wide", hello={"max_sequences": 3})
    assert chosen(replace(ask, choices=3), workers) == "wide"


def test_a_worker_whose_numbers_cannot_be_compared_comes_last(add, ask, workers) -> None:
    odd = add("odd")
    workers.rows[odd.slot]["median_step_ms"] = np.nan
    assert chosen(ask, workers) == "odd"
    add("even", median_step_ms=50.0)
    assert chosen(ask, workers) == "even"


def test_nothing_is_known_of_a_model_without_workers(workers, make) -> None:
    demand = make.demand(prompt_tokens=10**6)
    assert never_fits(demand, limits_of(demand.pins, demand.choices, workers)) is None


def test_slots_are_reused_and_grow_with_the_workers(add, ask, workers) -> None:
    first = [add(f"w{i}") for i in range(5)]
    workers.detach(first[2])
    assert add("w9").slot == first[2].slot
    assert len(workers) == 5
    assert serving(ask, workers).sum() == 5
