"""Bundles in pieces: they come back whole; what is not next, not whole or not theirs is refused by its field."""

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidRequest, PayloadTooLarge
from mesh.kv import Bundle, KeySet, KvGeometry
from mesh.kv_wire import PIECE_BYTES, Assembly, check_wanted, geometry_of, key_set_message, pieces_of
from shoal.cache.v1 import cache_pb2 as pb

SMALL = KvGeometry("fp16", block_tokens=2, layers=2, kv_heads=1, head_dim=4)
LARGE = KvGeometry("fp32", block_tokens=16, layers=61, kv_heads=8, head_dim=64)
NAMESPACE, KEY = b"n" * 16, b"k" * 16
MOST = 64 * 1024 * 1024


def bundle(geometry: KvGeometry = SMALL, key: bytes = KEY) -> Bundle:
    return Bundle.of(key, NAMESPACE, geometry, os.urandom(geometry.bundle_bytes))


def piece(whole: Bundle, **header: object) -> pb.Chunk:
    (only,) = pieces_of(whole)
    for name, value in header.items():
        setattr(only.header, name, value)
    return only


@pytest.mark.parametrize("geometry", [SMALL, LARGE])
def test_a_bundle_comes_back_whole_from_pieces_within_their_limit(geometry) -> None:
    sent = bundle(geometry)
    pieces = [pb.Chunk.FromString(each.SerializeToString()) for each in pieces_of(sent)]
    assert all(len(each.payload) <= PIECE_BYTES for each in pieces)
    assert [each.HasField("header") for each in pieces] == [True] + [False] * (len(pieces) - 1)
    assembly = Assembly(pieces[0], MOST)
    for each in pieces[1:]:
        assert not assembly.whole
        assembly.add(each)
    assert assembly.whole
    assert assembly.bundle() == sent


def test_pieces_are_made_one_at_a_time() -> None:
    view = memoryview(bytearray(LARGE.bundle_bytes))
    pieces = pieces_of(Bundle.of(KEY, NAMESPACE, LARGE, view))
    next(pieces)
    view[PIECE_BYTES] = 7
    assert next(pieces).payload[0] == 7


@pytest.mark.parametrize(
    ("header", "field", "code"),
    [
        ({"key": b"k"}, "header.key", "key"),
        ({"namespace": b""}, "header.namespace", "key"),
        ({"kv_dtype": "fp99"}, "header.kv_dtype", "geometry"),
        ({"kv_dtype": ""}, "header.kv_dtype", "geometry"),
        ({"block_tokens": 0}, "header.block_tokens", "geometry"),
        ({"layers": 3}, "header.payload_bytes", "geometry"),
        ({"kv_heads": 2**32 - 1}, "header.kv_heads", "geometry"),
        ({"payload_bytes": 0}, "header.payload_bytes", "geometry"),
        ({"format_version": 2}, "header.format_version", "version"),
        ({"checksum": 1}, "header.checksum", "checksum"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused_by_its_field(header, field, code) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Assembly(piece(bundle(), **header), MOST).bundle()
    assert (refused.value.field, refused.value.code) == (field, code)


@pytest.mark.parametrize("numbers", [(65_535, 65_535, 65_535, 65_535), (16, 61, 8, 4096)])
def test_a_bundle_over_the_limit_is_too_large_before_its_payload_comes(numbers) -> None:
    block_tokens, layers, kv_heads, head_dim = numbers
    wrong = piece(bundle(), block_tokens=block_tokens, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    with pytest.raises(PayloadTooLarge) as refused:
        Assembly(wrong, MOST)
    assert refused.value.field == "header.payload_bytes"


def chunk(offset: int, size: int, header: pb.BundleHeader | None = None) -> pb.Chunk:
    return pb.Chunk(header=header, offset=offset, payload=bytes(size))


@pytest.mark.parametrize(
    ("following", "field", "code"),
    [
        (chunk(0, 8), "offset", "order"),
        (chunk(24, 8), "offset", "order"),
        (chunk(2**32 - 1, 8), "offset", "order"),
        (chunk(16, 0), "payload", "empty"),
        (chunk(16, 49), "payload", "order"),
        (chunk(0, 16, pb.BundleHeader()), "payload", "truncated"),
        (chunk(16, PIECE_BYTES + 1), "payload", "too_large"),
    ],
)
def test_a_piece_that_is_not_next_is_refused_by_its_field(following, field, code) -> None:
    first = piece(bundle())
    first.payload = first.payload[:16]
    assembly = Assembly(first, MOST)
    with pytest.raises(InvalidRequest) as refused:
        assembly.add(following)
    assert (refused.value.field, refused.value.code) == (field, code)


def test_a_bundle_begins_with_its_header() -> None:
    with pytest.raises(InvalidRequest) as refused:
        Assembly(chunk(0, 16), MOST)
    assert (refused.value.field, refused.value.code) == ("header", "order")


@given(st.sets(st.integers(1, SMALL.bundle_bytes - 1)))
def test_however_it_is_cut_it_is_the_same_bundle(cuts) -> None:
    sent = bundle()
    ends = pairwise([0, *sorted(cuts), SMALL.bundle_bytes])
    pieces = [pb.Chunk(offset=start, payload=sent.payload[start:end]) for start, end in ends]
    pieces[0].header.CopyFrom(piece(sent).header)
    assembly = Assembly(pieces[0], MOST)
    for each in pieces[1:]:
        assembly.add(each)
    assert assembly.bundle() == sent


def test_only_what_was_asked_for_is_taken() -> None:
    keys = KeySet(NAMESPACE, (KEY, b"l" * 16), SMALL)
    header = piece(bundle()).header
    check_wanted(header, SMALL, keys, 0)
    for wanted, geometry, index in (
        (keys, SMALL, 1),
        (KeySet(b"m" * 16, keys.keys, SMALL), SMALL, 0),
        (keys, LARGE, 0),
    ):
        with pytest.raises(InvalidRequest) as refused:
            check_wanted(header, geometry, wanted, index)
        assert refused.value.code == "foreign"


def test_a_key_set_travels() -> None:
    keys = KeySet(NAMESPACE, (KEY, b"l" * 16), SMALL)
    message = pb.KeySet.FromString(key_set_message(keys).SerializeToString())
    assert message.keys == KEY + b"l" * 16
    assert geometry_of(message) == SMALL
