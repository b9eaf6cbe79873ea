"""What a call's span says of it."""

from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh.kv_wire import key_set_message, pieces_of
from shoal.cache.v1 import cache_pb2 as pb

from .conftest import GEOMETRY, Running

Attributes = Callable[[str], dict]


@pytest.fixture
async def traced(serve, valkey) -> AsyncIterator[tuple[Running, Attributes]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def of(method: str) -> dict:
        for span in exporter.get_finished_spans():
            if span.name.endswith(method):
                return {name: value for name, value in span.attributes.items() if name.startswith("shoal.")}
        return {}

    async with serve(valkey, interceptors=[aio_server_interceptor(tracer_provider=provider)]) as running:
        yield running, of
    provider.shutdown()


async def test_spans_tell_keys_hits_and_bytes(traced, make, keys, eventually) -> None:
    running, of = traced
    bundles = make(3)
    asked = key_set_message(keys(bundles))
    for sent in (bundles[:1], bundles[:2]):
        await running.stub.Put(iter([piece for bundle in sent for piece in pieces_of(bundle)]), timeout=20)
    await running.stub.Match(pb.MatchRequest(keys=asked), timeout=20)
    assert [chunk async for chunk in running.stub.Get(pb.GetRequest(keys=asked), timeout=20)]
    size = GEOMETRY.bundle_bytes
    await eventually(lambda: of("Match") and of("Get"))
    assert of("Match") == told(3, 2, 0, "ok")
    assert of("Get") == told(3, 2, 2 * size, "miss")


async def test_a_refused_bundle_is_told_by_its_span(traced, make, eventually) -> None:
    running, of = traced
    (piece,) = pieces_of(make(1)[0])
    piece.header.checksum = 1
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.Put(iter([piece]), timeout=20)
    await eventually(lambda: of("Put"))
    assert of("Put") == told(0, 0, 0, "invalid")


def told(keys: int, hits: int, size: int, finish: str) -> dict:
    return {"shoal.cache.keys": keys, "shoal.cache.hits": hits, "shoal.cache.bytes": size, "shoal.finish": finish}
