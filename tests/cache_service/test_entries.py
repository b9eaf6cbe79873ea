"""Entries in Redis: they come back as the bundle they are, or not at all."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.redis_bundles import storage_key
from cache_service.translate import Damaged, bundle_of, entry_of
from mesh.kv import Bundle, KeySet, KvGeometry

GEOMETRY = KvGeometry("fp16", block_tokens=2, layers=2, kv_heads=1, head_dim=4)
BUNDLE = Bundle.of(b"k" * 16, b"n" * 16, GEOMETRY, bytes(range(64)))
KEYS = KeySet(BUNDLE.namespace, (b"j" * 16, BUNDLE.key), GEOMETRY)
ENTRY = entry_of(BUNDLE)


def test_an_entry_comes_back_as_the_bundle_it_is() -> None:
    found = bundle_of(ENTRY, KEYS, 1)
    assert replace(found, payload=bytes(found.payload)) == BUNDLE


@given(st.integers(0, len(ENTRY) - 1), st.integers(1, 255))
def test_one_changed_byte_anywhere_is_damage(at, change) -> None:
    with pytest.raises(Damaged):
        bundle_of(ENTRY[:at] + bytes([ENTRY[at] ^ change]) + ENTRY[at + 1 :], KEYS, 1)


@given(st.integers(0, len(ENTRY) - 1))
def test_a_cut_entry_is_damage(length) -> None:
    with pytest.raises(Damaged):
        bundle_of(ENTRY[:length], KEYS, 1)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_damage(noise) -> None:
    with pytest.raises(Damaged):
        bundle_of(noise, KEYS, 1)


@pytest.mark.parametrize(
    ("keys", "index"),
    [
        (KEYS, 0),
        (replace(KEYS, namespace=b"m" * 16), 1),
        (replace(KEYS, geometry=replace(GEOMETRY, dtype="bf16")), 1),
        (replace(KEYS, geometry=replace(GEOMETRY, layers=1)), 1),
    ],
)
def test_another_keys_tenants_or_formats_entry_is_damage(keys, index) -> None:
    with pytest.raises(Damaged):
        bundle_of(ENTRY, keys, index)


def test_whatever_the_bytes_depend_on_has_a_place_of_its_own() -> None:
    geometries = [
        KvGeometry(dtype, *numbers)
        for dtype in ("bf16", "fp16")
        for numbers in product((1, 11), (1, 11), (1,), (1, 11))
    ]
    names = [b"a" * 16, b"b" * 16]
    places = {storage_key(space, key, geometry) for space in names for key in names for geometry in geometries}
    assert len(places) == len(geometries) * 4
