"""The cache service over a real Valkey: what is stored, found and kept, and what is refused."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import grpc
import pytest
from redis.asyncio import Redis

from cache_service.redis_bundles import storage_key
from cache_service.translate import entry_of, keys_of
from mesh.errors import DeadlineExceeded, InvalidRequest, Overloaded, PayloadTooLarge, ShoalError, error_of
from mesh.kv import Bundle, KeySet
from mesh.kv_wire import PIECE_BYTES, key_set_message, pieces_of
from shoal.cache.v1 import cache_pb2 as pb

from .conftest import GEOMETRY, LARGE, LIMITS, Running

TIMEOUT_S = 20


async def match(running: Running, keys: KeySet) -> int:
    request = pb.MatchRequest(keys=key_set_message(keys))
    return (await running.stub.Match(request, timeout=TIMEOUT_S)).leading_blocks


async def get(running: Running, keys: KeySet) -> list[pb.Chunk]:
    request = pb.GetRequest(keys=key_set_message(keys))
    return [chunk async for chunk in running.stub.Get(request, timeout=TIMEOUT_S)]


async def put(running: Running, chunks: Iterable[pb.Chunk]) -> pb.PutReply:
    return await running.stub.Put(iter(list(chunks)), timeout=TIMEOUT_S)


async def refusal(running: Running, chunks: Iterable[pb.Chunk]) -> ShoalError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await put(running, chunks)
    return error_of(refused.value)


async def rest_of(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def chunks_of(bundles: Iterable[Bundle]) -> list[pb.Chunk]:
    return [piece for bundle in bundles for piece in pieces_of(bundle)]


@pytest.fixture
async def redis(valkey: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey) as client:
        yield client


def place(bundle: Bundle) -> bytes:
    return storage_key(bundle.namespace, bundle.key, bundle.geometry)


async def test_what_is_put_is_matched_and_comes_back_in_the_order_of_the_keys(running, make, keys) -> None:
    bundles = make(7)
    assert await match(running, keys(bundles)) == 0
    reply = await put(running, chunks_of(reversed(bundles)))
    assert (reply.stored, reply.already_held, reply.refused) == (7, 0, 0)
    assert await match(running, keys(bundles)) == 7
    chunks = await get(running, keys(bundles))
    assert [chunk.header.key for chunk in chunks] == [bundle.key for bundle in bundles]
    assert [chunk.payload for chunk in chunks] == [bundle.payload for bundle in bundles]
    assert {chunk.header.checksum for chunk in chunks} == {bundle.checksum for bundle in bundles}


async def test_large_bundles_travel_in_pieces_within_the_limit(running, make, keys) -> None:
    bundles = make(3, replace(LARGE, layers=61))
    await put(running, chunks_of(bundles))
    chunks = await get(running, keys(bundles))
    assert max(len(chunk.payload) for chunk in chunks) == PIECE_BYTES
    assert [chunk.HasField("header") for chunk in chunks] == [True, False] * 3
    assert b"".join(chunk.payload for chunk in chunks) == b"".join(bytes(bundle.payload) for bundle in bundles)


@pytest.mark.parametrize("held", [0, 1, 128, 129, 300])
async def test_match_and_get_stop_at_the_first_gap(running, make, keys, held) -> None:
    bundles = make(302)
    await put(running, chunks_of(bundles[:held] + bundles[held + 1 :]))
    assert await match(running, keys(bundles)) == held
    assert len(await get(running, keys(bundles))) == held


async def test_what_is_held_already_is_not_written_again_but_kept_longer(running, make, redis) -> None:
    (bundle,) = bundles = make(1)
    await put(running, chunks_of(bundles))
    await redis.pexpire(place(bundle), 1000)
    reply = await put(running, chunks_of(bundles))
    assert (reply.stored, reply.already_held) == (0, 1)
    assert await redis.pttl(place(bundle)) > 500_000


async def test_every_entry_has_a_time_to_live_that_reading_renews(running, make, keys, redis) -> None:
    bundles = make(2)
    await put(running, chunks_of(bundles))
    assert all([590_000 < await redis.pttl(place(bundle)) <= 600_000 for bundle in bundles])
    await redis.pexpire(place(bundles[0]), 1000)
    await get(running, keys(bundles))
    assert await redis.pttl(place(bundles[0])) > 500_000


async def test_neither_another_tenant_nor_another_kv_format_finds_it(running, make, keys) -> None:
    """B14, B15: the namespace carries tenant, weights, tokenizer and adapter; the place carries dtype and geometry."""
    bundles = make(3)
    await put(running, chunks_of(bundles))
    asked = keys(bundles)
    others = [
        replace(asked, namespace=secrets.token_bytes(16)),
        replace(asked, geometry=replace(GEOMETRY, dtype="bf16")),  # as many bytes
        replace(asked, geometry=replace(GEOMETRY, layers=1, kv_heads=2)),  # as many bytes
    ]
    for other in others:
        assert await match(running, other) == 0
        assert await get(running, other) == []
    assert await match(running, asked) == 3


def changed(bundle: Bundle, **header: object) -> pb.Chunk:
    (chunk,) = pieces_of(bundle)
    for name, value in header.items():
        setattr(chunk.header, name, value)
    return chunk


BAD_HEADERS = [
    ({"key": b"short"}, "header.key", "key"),
    ({"namespace": b""}, "header.namespace", "key"),
    ({"kv_dtype": "fp3"}, "header.kv_dtype", "geometry"),
    ({"block_tokens": 0}, "header.block_tokens", "geometry"),
    ({"layers": 4_000_000_000}, "header.layers", "geometry"),
    ({"kv_heads": 3}, "header.payload_bytes", "geometry"),
    ({"payload_bytes": 2**32 - 1}, "header.payload_bytes", "geometry"),
    ({"format_version": 99}, "header.format_version", "version"),
    ({"checksum": 1}, "header.checksum", "checksum"),
    ({"layers": 60_000, "head_dim": 60_000, "kv_heads": 60_000}, "header.payload_bytes", "too_large"),
    ({"namespace": b"f" * 16}, "header.namespace", "foreign"),
]


@pytest.mark.parametrize(("header", "field", "reason"), BAD_HEADERS, ids=lambda value: str(value)[:40])
async def test_a_bad_bundle_is_refused_by_its_field_and_counted_and_what_came_before_it_stays(
    running, make, keys, redis, header, field, reason
) -> None:
    good, bad = make(1), make(2)
    bad = [Bundle.of(each.key, good[0].namespace, GEOMETRY, each.payload) for each in bad]
    before = await redis.dbsize()
    error = await refusal(running, [*chunks_of(good), changed(bad[0], **header), *chunks_of(bad[1:])])
    assert isinstance(error, PayloadTooLarge if reason == "too_large" else InvalidRequest)
    assert (error.field, error.code) == (field, reason)
    assert field in error.message or field.rpartition(".")[0] in error.message
    assert running.metric("refused_total", reason=reason) == 1
    assert await redis.dbsize() == before + 1
    assert await match(running, keys(good)) == 1


def parts(bundle: Bundle, *cuts: int) -> list[pb.Chunk]:
    """The bundle in pieces that end at `cuts`; what comes after the last is left out."""
    (whole,) = pieces_of(bundle)
    ends = zip((0, *cuts), cuts, strict=False)
    chunks = [pb.Chunk(offset=start, payload=whole.payload[start:end]) for start, end in ends]
    chunks[0].header.CopyFrom(whole.header)
    return chunks


SIZE = GEOMETRY.bundle_bytes
BAD_STREAMS = {
    "no header": (lambda b: parts(b, SIZE // 2, SIZE)[1:], "header", "order"),
    "no message at all": (lambda b: [pb.Chunk()], "header", "order"),
    "a header without payload": (lambda b: [pb.Chunk(header=parts(b, SIZE)[0].header)], "payload", "empty"),
    "an empty piece": (lambda b: [parts(b, SIZE // 2)[0], pb.Chunk(offset=SIZE // 2)], "payload", "empty"),
    "truncated": (lambda b: parts(b, SIZE - 1), "payload", "truncated"),
    "truncated by the next": (lambda b: [*parts(b, 100), *parts(b, SIZE)], "payload", "truncated"),
    "a gap": (lambda b: [parts(b, 100, 200, SIZE)[i] for i in (0, 2)], "offset", "order"),
    "a piece twice": (lambda b: [parts(b, 100, 200, SIZE)[i] for i in (0, 1, 1)], "offset", "order"),
    "too much": (lambda b: [parts(b, 100)[0], pb.Chunk(offset=100, payload=bytes(SIZE))], "payload", "order"),
    "a piece too large": (
        lambda b: [parts(b, 100)[0], pb.Chunk(offset=100, payload=bytes(PIECE_BYTES + 1))],
        "payload",
        "too_large",
    ),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
async def test_pieces_that_make_no_bundle_are_refused_by_their_field_and_nothing_is_stored(
    running, make, keys, redis, name
) -> None:
    build, field, reason = BAD_STREAMS[name]
    (bundle,) = bundles = make(1)
    error = await refusal(running, build(bundle))
    assert isinstance(error, InvalidRequest)
    assert (error.field, error.code) == (field, reason)
    assert running.metric("refused_total", reason=reason) == 1
    assert await match(running, keys(bundles)) == 0


async def test_a_stream_of_nothing_stores_nothing(running) -> None:
    assert await put(running, []) == pb.PutReply()


async def test_one_stream_has_one_geometry(running, make, keys) -> None:
    first = make(1)
    other = make(1, replace(GEOMETRY, layers=4), namespace=first[0].namespace)
    error = await refusal(running, chunks_of(first + other))
    assert (error.field, error.code) == ("header", "foreign")
    assert await match(running, keys(other)) == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"keys": b"k" * 17}, "keys.keys"),
        ({"keys": b"k" * 16 * 1001}, "keys.keys"),
        ({"namespace": b"n"}, "keys.namespace"),
        ({"kv_dtype": "int3"}, "keys.kv_dtype"),
        ({"head_dim": 0}, "keys.head_dim"),
        ({"layers": 60_000, "kv_heads": 60_000, "head_dim": 60_000}, "keys"),
    ],
    ids=str,
)
async def test_a_bad_question_is_refused_by_its_field(running, make, keys, change, field) -> None:
    message = key_set_message(keys(make(1)))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as matched:
        await running.stub.Match(pb.MatchRequest(keys=message), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as got:
        async for _ in running.stub.Get(pb.GetRequest(keys=message), timeout=TIMEOUT_S):
            pass
    for refused in (matched, got):
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_of(refused.value).field == field
    assert running.metric("operations_total", operation="get", outcome="invalid") == 1


def test_reading_a_question_takes_time_in_proportion_to_its_keys() -> None:
    message = pb.KeySet(namespace=b"n" * 16, keys=os.urandom(16 * 65_536), kv_dtype="fp16")
    message.block_tokens = message.layers = message.kv_heads = message.head_dim = 1
    began = time.process_time()
    found = keys_of(pb.MatchRequest(keys=message), replace(LIMITS, max_keys=65_536))
    assert time.process_time() - began < 0.5
    assert b"".join(found.keys) == message.keys


@pytest.mark.parametrize("damage", ["flipped", "cut", "another key's", "no entry", "another type"])
async def test_an_entry_that_is_not_what_its_key_says_is_a_miss_and_gives_way_to_a_good_one(
    running, make, keys, redis, damage
) -> None:
    """B15, B18: entries name their own key, so bytes of another never pass for it."""
    bundles = make(3)
    await put(running, chunks_of(bundles))
    entry = entry_of(bundles[1])
    written = {
        "flipped": entry[:-1] + bytes([entry[-1] ^ 1]),
        "cut": entry[:-1],
        "another key's": entry_of(bundles[2]),
        "no entry": b"\xff\xff\xff\xff nonsense",
    }
    await redis.delete(place(bundles[1]))
    if damage == "another type":
        await redis.rpush(place(bundles[1]), "a list")
    else:
        await redis.set(place(bundles[1]), written[damage])
    assert [chunk.header.key for chunk in await get(running, keys(bundles))] == [bundles[0].key]
    assert running.metric("mismatches_total") == 1
    assert (await put(running, chunks_of(bundles))).stored == 1
    assert len(await get(running, keys(bundles))) == 3


async def test_a_cancelled_put_leaves_nothing_of_the_open_bundle(running, make, keys, eventually) -> None:
    first = make(1)
    second = make(1, namespace=first[0].namespace)
    call = running.stub.Put(timeout=TIMEOUT_S)
    await call.write(chunks_of(first)[0])
    await eventually(lambda: running.metric("bundles_total", result="stored"))
    await call.write(parts(second[0], 100)[0])
    await eventually(lambda: running.store.receiving.held)
    call.cancel()
    await eventually(lambda: running.store.receiving.held == 0 and running.in_flight.count == 0)
    assert await match(running, keys(first)) == 1
    assert await match(running, keys(second)) == 0
    assert running.metric("operations_total", operation="put", outcome="cancelled") == 1
    assert running.metric("refused_total", reason="truncated") == 0


async def test_a_sender_that_does_not_finish_a_bundle_is_sent_away(serve, valkey, make) -> None:
    async with serve(valkey, stall_s=0.2) as running:
        call = running.stub.Put(timeout=TIMEOUT_S)
        await call.write(parts(make(1)[0], 100)[0])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert isinstance(error_of(refused.value), DeadlineExceeded)
        assert running.store.receiving.held == 0


async def test_open_bundles_are_bounded_by_their_bytes(serve, valkey, make, eventually) -> None:
    first, second = make(1, LARGE), make(1, LARGE)
    size = LARGE.bundle_bytes
    async with serve(valkey, held_bytes=size, max_bundle_bytes=size, room_s=0.05) as running:
        opened = running.stub.Put(timeout=TIMEOUT_S)
        await opened.write(parts(first[0], 100)[0])
        await eventually(lambda: running.store.receiving.held)
        error = await refusal(running, chunks_of(second))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s
        opened.cancel()
        await eventually(lambda: not running.store.receiving.held)
        assert (await put(running, chunks_of(second))).stored == 1


async def test_calls_of_put_are_bounded_by_their_number(serve, valkey, make, eventually) -> None:
    async with serve(valkey, puts=1, room_s=0.05) as running:
        opened = running.stub.Put(timeout=TIMEOUT_S)
        await opened.write(parts(make(1)[0], 100)[0])
        await eventually(lambda: running.store.receiving.held)
        refused = await refusal(running, chunks_of(make(1)))
        assert isinstance(refused, Overloaded)
        assert "1 of 1 calls of Put" in refused.message
        assert running.metric("operations_total", operation="put", outcome="no_room") == 1
        opened.cancel()
        await eventually(lambda: running.store.puts.held == 0)
        assert (await put(running, chunks_of(make(1)))).stored == 1


async def test_a_reader_that_takes_nothing_makes_the_service_hold_little_and_is_cut_off(
    serve, valkey, make, keys, eventually
) -> None:
    bundles = make(40, LARGE)
    async with serve(valkey, stall_s=1.0, held_bytes=2**30) as running:
        await put(running, chunks_of(bundles))
        call = running.stub.Get(pb.GetRequest(keys=key_set_message(keys(bundles))), timeout=TIMEOUT_S)
        await call.read()
        # Though its reader is still there:
        await eventually(lambda: running.metric("operations_total", operation="get", outcome="stalled") == 1)
        assert running.store.sending.held == 0
        assert running.metric("hits_total") < 40
        with pytest.raises(grpc.aio.AioRpcError) as cut:  # no silent end, which would look whole
            await rest_of(call)
        assert isinstance(error_of(cut.value), DeadlineExceeded)


async def test_a_cancelled_get_sends_no_more_and_holds_nothing(running, make, keys, eventually) -> None:
    bundles = make(40, LARGE)
    await put(running, chunks_of(bundles))
    call = running.stub.Get(pb.GetRequest(keys=key_set_message(keys(bundles))), timeout=TIMEOUT_S)
    await call.read()
    call.cancel()
    await eventually(lambda: running.in_flight.count == 0 and running.store.sending.held == 0)
    assert await match(running, keys(bundles)) == 40


async def test_stats_and_metrics_tell_what_passed(running, make, keys) -> None:
    bundles = make(4)
    await put(running, chunks_of(bundles[:3]))
    await put(running, chunks_of(bundles[:1]))
    await get(running, keys(bundles))
    await refusal(running, [changed(bundles[3], checksum=1)])
    stats = await running.stub.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
    assert (stats.hits, stats.misses, stats.stored, stats.refused, stats.mismatches) == (3, 1, 3, 1, 0)
    assert (stats.bytes_read, stats.bytes_written) == (3 * SIZE, 3 * SIZE)
    assert running.metric("bundles_total", result="held") == 1
    assert running.metric("operations_total", operation="put", outcome="ok") == 2
    assert running.metric("operations_total", operation="get", outcome="miss") == 1
    assert running.metric("operation_seconds_count", operation="get") == 1
    assert running.metric("redis_up") == 1


async def test_many_at_once_each_get_their_own(serve, valkey, make, keys) -> None:
    chains = [make(5) for _ in range(20)]
    async with serve(valkey, connections=3) as running:
        await asyncio.gather(*(put(running, chunks_of(chain)) for chain in chains))
        found = await asyncio.gather(*(get(running, keys(chain)) for chain in chains))
    assert [[c.payload for c in chunks] for chunks in found] == [[b.payload for b in chain] for chain in chains]
