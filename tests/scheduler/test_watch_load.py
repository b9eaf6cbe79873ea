"""WatchLoad over real gRPC: what gateways and `shoal status` are told of the mesh, and how often."""

import asyncio

from shoal.scheduler.v1 import scheduler_pb2 as pb

BUSY = {"queued_prefill_tokens": 100_000}


async def test_watch_load_tells_at_once_then_on_change_then_each_second(mesh) -> None:
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    loop = asyncio.get_running_loop()
    first = await watch.read()
    assert (first.scheduler_id, first.settled, first.draining, len(first.workers)) == ("s1", True, False, 0)
    began = loop.time()
    await watch.read()
    assert 0.5 < loop.time() - began < 2
    worker = await mesh.worker(load={"running": (("x", 1),), "free_blocks": 77})
    began = loop.time()
    mesh_load = await watch.read()
    while not (mesh_load.workers and mesh_load.workers[0].load.seq):
        mesh_load = await watch.read()
    assert loop.time() - began < 0.7
    (state,) = mesh_load.workers
    assert (state.hello.worker_id, state.load.free_blocks, len(state.load.running)) == ("w1", 77, 0)
    await worker.close()
    while (await watch.read()).workers:
        pass
    watch.cancel()


async def test_an_absurd_wait_counts_as_a_day_and_the_watchers_go_on(mesh, eventually) -> None:
    await mesh.worker(load=BUSY)
    await mesh.open(waited_ms=4294967295)
    await eventually(lambda: mesh.waiting() == 1)
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    for _ in range(2):
        (queue,) = (await watch.read()).queues
        assert 86_400_000 <= queue.oldest_ms < 86_500_000
    watch.cancel()


async def test_watch_load_is_sent_at_most_ten_times_a_second(mesh) -> None:
    worker = await mesh.worker()
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    await watch.read()
    loop = asyncio.get_running_loop()
    began, messages = loop.time(), 0
    while messages < 6:
        await worker.report()
        await watch.read()
        messages += 1
    assert loop.time() - began >= 0.45
    watch.cancel()


async def test_watch_load_shows_queues_and_charges(mesh, eventually) -> None:
    worker = await mesh.worker()
    await (await mesh.open("r1")).grant()
    await worker.report(**BUSY, running=(("r1", 1),))
    await eventually(lambda: mesh.dispatcher.fleet.workers.rows["queued_prefill_tokens"].any())
    await mesh.open("r2")
    await eventually(lambda: mesh.waiting() == 1)
    watch = mesh.stub.WatchLoad(pb.WatchLoadRequest(), timeout=10)
    state = await watch.read()
    watch.cancel()
    (queue,) = state.queues
    assert (queue.queue_class, queue.waiting, queue.model, queue.pool) == ("normal/S", 1, "tiny", "default")
    assert queue.cost > 0
    assert state.workers[0].charged_tokens > 0
