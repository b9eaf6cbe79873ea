"""Sampling values are checked in one place, and survive the wire."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.sampling import Sampling, from_proto, to_proto

VOCABULARY = 1000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 2.1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 10**400),
        ("top_logprobs", 10**400),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", 11),
        ("seed", -1),
        ("seed", 1 << 64),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", math.nan),
        ("top_logprobs", 1_000_000),
        ("logit_bias", {191_222: -100.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("stop_token_ids", (VOCABULARY,)),
        ("stop_token_ids", (-1,)),
        ("json_schema", ""),
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", "[" * 60_000),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65),
        ("json_schema", '{"description": "' + "a" * (64 << 10) + '"}'),
        ("regex", ""),
        ("regex", "é" * (40 << 10)),
        ("grammar", "a" * (10 << 20)),
    ],
)
def test_a_value_no_step_could_honour_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Sampling(**{"max_tokens": 10, field: value}).check(VOCABULARY)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 2.0])
def test_edge_values_that_can_be_honoured_are_taken(temperature: float) -> None:
    Sampling(max_tokens=1, temperature=temperature, seed=(1 << 64) - 1).check(VOCABULARY)


def test_the_least_repetition_penalty_is_taken_before_the_wire_and_after_it() -> None:
    sampling = Sampling(max_tokens=1, repetition_penalty=0.01)
    for each in (sampling, from_proto(to_proto(sampling))):
        each.check(VOCABULARY)


floats = st.floats(0, 2, width=32)


@given(
    st.builds(
        Sampling,
        max_tokens=st.integers(1, 1 << 20),
        temperature=floats,
        top_k=st.integers(0, 1 << 20),
        seed=st.none() | st.integers(0, (1 << 64) - 1),
        presence_penalty=floats,
        logit_bias=st.dictionaries(st.integers(0, 999), floats, max_size=3),
        stop_token_ids=st.lists(st.integers(0, 999), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        top_logprobs=st.none() | st.integers(0, 20),
    )
)
def test_sampling_survives_the_wire(sampling: Sampling) -> None:
    assert from_proto(type(to_proto(sampling)).FromString(to_proto(sampling).SerializeToString())) == sampling


def test_an_answer_has_one_structure_and_ends_where_that_ends() -> None:
    with pytest.raises(InvalidRequest) as twice:
        Sampling(max_tokens=10, json_schema="{}", regex="a").check(VOCABULARY)
    assert twice.value.field == "regex"
    with pytest.raises(InvalidRequest) as endless:
        Sampling(max_tokens=10, regex="a", ignore_eos=True).check(VOCABULARY)
    assert endless.value.field == "ignore_eos"


@pytest.mark.parametrize("given", [{"json_schema": '{"type": "object"}'}, {"regex": "a+"}, {"grammar": 'root ::= "a"'}])
def test_a_structure_passes_and_is_told_with_its_name(given: dict[str, str]) -> None:
    sampling = Sampling(max_tokens=10, **given)
    sampling.check(VOCABULARY)
    assert sampling.structure == next(iter(given.items()))
    assert from_proto(to_proto(sampling)) == sampling
