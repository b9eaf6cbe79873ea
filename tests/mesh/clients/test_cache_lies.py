"""A worker's view of a cold cache that sends what was not asked for, or damaged: it is never believed."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mesh.kv import Bundle
from mesh.kv_wire import pieces_of
from shoal.cache.v1 import cache_pb2 as pb

from .conftest import bundles, keys_of, using


def broken(change: Callable[[pb.Chunk], None], at: int = 1) -> Callable[[list[Bundle]], Any]:
    def script(sent: list[Bundle]) -> Any:
        async def lies(request: pb.GetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
            for index, bundle in enumerate(sent):
                for piece in pieces_of(bundle):
                    if index == at:
                        change(piece)
                    yield piece

        return lies

    return script


def setting(**values: object) -> Callable[[pb.Chunk], None]:
    def change(piece: pb.Chunk) -> None:
        for name, value in values.items():
            setattr(piece.header, name, value)

    return change


def flip(piece: pb.Chunk) -> None:
    piece.payload = piece.payload[:-1] + bytes([piece.payload[-1] ^ 1])


def cut(piece: pb.Chunk) -> None:
    piece.payload = piece.payload[:-1]


LIES = {
    "another key": setting(key=b"x" * 16),
    "another tenant's": setting(namespace=b"x" * 16),
    "another dtype of the same size": setting(kv_dtype="bf16"),
    "another geometry of the same size": setting(layers=1, kv_heads=2),
    "a size of its own": setting(payload_bytes=10),
    "another format": setting(format_version=2),
    "another checksum": setting(checksum=7),
    "a flipped bit": flip,
    "a cut payload": cut,
    "an offset": lambda piece: setattr(piece, "offset", 5),
    "no header": lambda piece: piece.ClearField("header"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_ends_a_fetch_before_it_is_believed(peer, lie) -> None:
    sent = bundles(3)
    peer.get = broken(LIES[lie])(sent)
    async with using(peer.address) as client:
        assert await client.fetched(keys_of(sent)) == sent[:1]
        assert client.told == [("fetch", "mismatch")]
        assert client.caches.available  # once is no reason yet


async def test_a_truncated_last_bundle_is_a_mismatch(peer) -> None:
    sent = bundles(2)
    peer.get = broken(cut)(sent)
    async with using(peer.address) as client:
        assert await client.fetched(keys_of(sent)) == sent[:1]
    assert client.told == [("fetch", "mismatch")]


async def test_a_match_beyond_what_was_asked_is_none(peer) -> None:
    async def more(request: pb.MatchRequest) -> pb.MatchReply:
        return pb.MatchReply(leading_blocks=2)

    peer.match = more
    async with using(peer.address) as client:
        assert await client.caches.match(keys_of(bundles(1))) == 0
    assert client.told == [("match", "mismatch")]
