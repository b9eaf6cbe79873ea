"""Bundles and key sets: their sizes, what they refuse, and that damage shows."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest
from mesh.kv import ITEM_BYTES, Bundle, KeySet, KvGeometry

GEOMETRY = KvGeometry("fp32", block_tokens=16, layers=30, kv_heads=3, head_dim=64)
SMALL = KvGeometry("bf16", block_tokens=2, layers=2, kv_heads=1, head_dim=4)
NAMESPACE = b"n" * 16


def test_a_bundle_holds_all_layers_of_a_block() -> None:
    assert GEOMETRY.bundle_bytes == 720 * 1024
    assert dataclasses.replace(GEOMETRY, dtype="int8").bundle_bytes == 180 * 1024
    scales = 30 * 2 * 16 * 3 * 4
    assert dataclasses.replace(GEOMETRY, dtype="int8_tiled").bundle_bytes == 180 * 1024 + scales


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "fp7"}, "kv_dtype"),
        ({"dtype": "x" * 100_000}, "kv_dtype"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"layers": -1}, "layers"),
        ({"kv_heads": 2**32 - 1}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
    ],
)
def test_a_geometry_that_no_kv_has_is_refused_by_its_field(change, field) -> None:
    with pytest.raises(InvalidRequest) as refused:
        dataclasses.replace(GEOMETRY, **change)
    assert refused.value.field == field
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("length", [0, 15, 17])
def test_keys_and_namespaces_have_sixteen_bytes(length) -> None:
    wrong = b"k" * length
    for build in (
        lambda: KeySet(wrong, (), SMALL),
        lambda: KeySet(NAMESPACE, (b"k" * 16, wrong), SMALL),
        lambda: Bundle.of(wrong, NAMESPACE, SMALL, bytes(SMALL.bundle_bytes)),
    ):
        with pytest.raises(InvalidRequest):
            build()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_makes_the_same_bundle(kind) -> None:
    payload = bytes(range(64)) * (SMALL.bundle_bytes // 64)
    bundle = Bundle.of(b"k" * 16, NAMESPACE, SMALL, kind(payload))
    assert bundle.intact()
    assert bundle.checksum == Bundle.of(b"k" * 16, NAMESPACE, SMALL, payload).checksum


@pytest.mark.parametrize("size", [0, SMALL.bundle_bytes - 1, SMALL.bundle_bytes + 1])
def test_a_payload_of_another_size_makes_no_bundle(size) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Bundle.of(b"k" * 16, NAMESPACE, SMALL, bytes(size))
    assert refused.value.field == "payload"


@given(st.integers(0, SMALL.bundle_bytes - 1), st.integers(1, 255))
def test_one_changed_byte_shows(at, change) -> None:
    bundle = Bundle.of(b"k" * 16, NAMESPACE, SMALL, bytes(SMALL.bundle_bytes))
    payload = bytearray(bundle.payload)
    payload[at] ^= change
    assert not dataclasses.replace(bundle, payload=payload).intact()


def test_the_first_keys_are_a_key_set_of_their_own() -> None:
    keys = KeySet(NAMESPACE, tuple(bytes([n]) * 16 for n in range(5)), SMALL)
    assert keys.first(2).keys == (b"\0" * 16, b"\1" * 16)


def test_every_known_dtype_has_a_size() -> None:
    assert {"fp32", "bf16", "fp16", "int8"} <= set(ITEM_BYTES)
