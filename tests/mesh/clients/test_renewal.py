"""Clients that live as long as their process connect again with the certificates that lie there then."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from mesh.breaker import BreakerPolicy
from mesh.cli.certs import make_set
from mesh.clients.attempt import ChoiceEnd, Job, Meta
from mesh.clients.cache import Caches
from mesh.clients.outcomes import WorkerFailed
from mesh.clients.worker import Workers
from mesh.kv import KeySet, KvGeometry
from mesh.sampling import Sampling
from mesh.server import Server
from mesh.tls import CACHE, GATEWAY, WORKER, Tls
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc
from shoal.types.v1 import types_pb2
from shoal.worker.v1 import worker_pb2, worker_pb2_grpc

JOB = Job(
    meta=Meta(request_id="r", tenant="t", model="m"),
    attempt=1,
    worker_id="w",
    prompt_ids=[1],
    choices={0: []},
    sampling=Sampling(max_tokens=1),
    tokenizer_digest=b"d",
)

KEYS = KeySet(b"n" * 16, (b"k" * 16,), KvGeometry("fp16", block_tokens=16, layers=1, kv_heads=1, head_dim=8))


class Peer(worker_pb2_grpc.WorkerServiceServicer, cache_pb2_grpc.CacheServiceServicer):
    """A worker whose answers are empty, and a cache that is well. `go` lets answers end, `calls` counts them."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.calls = 0

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        self.calls += 1
        await self.go.wait()
        yield worker_pb2.GenerateResponse(finished=worker_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP))

    async def Stats(self, request: cache_pb2.StatsRequest, context: grpc.aio.ServicerContext) -> cache_pb2.StatsReply:
        return cache_pb2.StatsReply()


@asynccontextmanager
async def serving(peer: Peer, tls: Tls, port: int = 0) -> AsyncIterator[int]:
    server = Server(
        {
            "shoal.worker.v1.WorkerService": lambda s: worker_pb2_grpc.add_WorkerServiceServicer_to_server(peer, s),
            "shoal.cache.v1.CacheService": lambda s: cache_pb2_grpc.add_CacheServiceServicer_to_server(peer, s),
        }
    )
    yield await server.start("127.0.0.1", port, tls)
    await server.drain(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_set(tmp_path)
    return tmp_path


async def ask(workers: Workers, port: int) -> None:
    async with workers.generation(f"127.0.0.1:{port}", JOB, timeout_s=5) as generation:
        assert [type(event) async for event in generation.events()] == [ChoiceEnd]


async def test_a_gateway_meets_a_worker_again_after_all_certificates_were_replaced(folder: Path) -> None:
    async with Workers(Tls(folder, GATEWAY)) as workers:
        async with serving(Peer(), Tls(folder, WORKER)) as port:
            await ask(workers, port)
        make_set(folder, force=True)
        async with serving(Peer(), Tls(folder, WORKER), port):
            await ask(workers, port)


async def test_an_answer_that_runs_while_certificates_are_replaced_goes_on(
    folder: Path, eventually: Callable[..., Awaitable[object]]
) -> None:
    peer = Peer()
    async with Workers(Tls(folder, GATEWAY)) as workers, serving(peer, Tls(folder, WORKER)) as port:
        peer.go.clear()
        running = asyncio.ensure_future(ask(workers, port))
        await eventually(lambda: peer.calls == 1)
        make_set(folder, force=True)
        next_one = asyncio.ensure_future(ask(workers, port))
        await eventually(lambda: peer.calls == 2)
        peer.go.set()
        await asyncio.gather(running, next_one)


async def test_a_worker_meets_a_cache_that_comes_back_with_other_certificates(
    folder: Path, eventually: Callable[..., Awaitable[object]]
) -> None:
    policy = BreakerPolicy(open_s=0.02, open_most_s=0.05)
    async with asyncio.TaskGroup() as group:
        async with serving(Peer(), Tls(folder, CACHE)) as port:
            caches = Caches(f"127.0.0.1:{port}", lambda *_: None, breaker=policy, tls=Tls(folder, WORKER))
            running = group.create_task(caches.run())
            await eventually(lambda: caches.available)
        assert await caches.match(KEYS) == 0
        assert not caches.available
        make_set(folder, force=True)
        async with serving(Peer(), Tls(folder, CACHE), port):
            await eventually(lambda: caches.available)
        running.cancel()


async def test_a_worker_of_another_ca_is_a_failure_to_connect(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    make_set(elsewhere)
    async with Workers(Tls(folder, GATEWAY)) as workers, serving(Peer(), Tls(elsewhere, WORKER)) as port:
        with pytest.raises(WorkerFailed, match="Tls handshake failed"):
            await ask(workers, port)
