"""`shoal bench cold`: first token of a long prompt: computed, from the tier that workers share, and from the device.

A mesh of two workers and a cache service, as they are by default. Each round's prompt is new: worker A computes it
(cold), and is asked for it once more, because a worker stores what it sees a second time, as a prompt that many share
is; once the service holds its blocks, worker B starts from them (shared), and then from its own (device). Workers are
called directly, so that placement has no say.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import grpc
import uvloop

from mesh import models
from mesh.bench import local_mesh, machine
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure, Goal, Report, Row
from mesh.blocks import BLOCK_TOKENS, chain_keys, namespace
from mesh.cli.plan import MeshPlan
from mesh.client import connect
from mesh.clients.attempt import ChoiceEnd, Job, Meta, Tokens
from mesh.clients.outcomes import WorkerFailed, WorkerRefused
from mesh.clients.usage import Usage
from mesh.clients.worker import Workers
from mesh.errors import ShoalError
from mesh.kv import KeySet, KvGeometry
from mesh.kv_wire import key_set_message
from mesh.sampling import Sampling
from shoal.cache.v1 import cache_pb2, cache_pb2_grpc
from shoal.scheduler.v1 import scheduler_pb2
from shoal.types.v1 import types_pb2

LEAST_RATIO = 3.0
ANSWER_TIMEOUT_S = 120.0
STORED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.05
CALL_S = 5.0
# The scheduler stops what runs without a lease, as what this asks of workers does.
UNLEASED = {"SHOAL_SCHEDULER_UNCLAIMED_AFTER_S": "600"}
# A tokenizer's first ids are its special tokens.
FIRST_ORDINARY_ID = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdPlan:
    """How it is measured."""

    model: str
    rounds: int = 5
    prompt_tokens: int = 1040
    answer_tokens: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class First:
    """One answer: milliseconds to its first token, its ids, and what it used."""

    first_ms: float
    ids: list[int]
    usage: Usage

    def cached(self, tier: int) -> int:
        return self.usage.cached.get(tier, 0)


@dataclass(frozen=True, slots=True)
class Round:
    """The same prompt four times."""

    cold: First
    again: First  # at the worker that computed it, which stores it then
    shared: First
    device: First


def measure(plan: ColdPlan, command: str) -> Report:
    """Measure. Raises CannotMeasure if the mesh does not come up or the tier never holds a prompt."""
    before = machine.describe()
    with local_mesh.running(MeshPlan(model=plan.model, workers=2, caches=1), UNLEASED) as mesh:
        workers = sorted((worker.hello for worker in mesh.workers()), key=lambda hello: hello.address)
        if len(workers) != 2:
            raise CannotMeasure(f"two workers were started and {len(workers)} are there")
        cache = next(process for process in mesh.state.processes if process.role == "cache")
        address = f"127.0.0.1:{cache.ports['grpc']}"
        rounds = uvloop.run(_rounds(plan, workers, address))
        ran_on = mesh.facts() | machine.software()
    return Report(
        bench="cold",
        date=machine.now(),
        machine=before,
        command=command,
        ran_on=ran_on,
        rows=list(rows(plan, rounds)),
    )


async def _rounds(plan: ColdPlan, workers: list[scheduler_pb2.Hello], cache: str) -> list[Round]:
    rng = random.Random(plan.seed)
    vocabulary = _vocabulary_size(plan.model)
    found = []
    async with Workers() as link, connect(cache) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        with bar("measuring", plan.rounds + 1) as shown:
            for number in range(plan.rounds + 1):
                ids = [rng.randrange(FIRST_ORDINARY_ID, vocabulary) for _ in range(plan.prompt_tokens)]
                name = f"bench-cold-{number}"
                cold = await _first(link, workers[0], plan, ids, f"{name}-a")
                again = await _first(link, workers[0], plan, ids, f"{name}-again")
                await _stored(stub, workers[0], ids)
                shared = await _first(link, workers[1], plan, ids, f"{name}-b")
                device = await _first(link, workers[1], plan, ids, f"{name}-c")
                if number:  # the first warms up
                    found.append(Round(cold, again, shared, device))
                shown.advance()
    return found


def _vocabulary_size(model: str) -> int:
    from tokenizers import Tokenizer

    size: int = Tokenizer.from_file(str(models.find(model).tokenizer)).get_vocab_size()
    return size


async def _first(link: Workers, worker: scheduler_pb2.Hello, plan: ColdPlan, ids: list[int], name: str) -> First:
    """One greedy answer of `worker` to its end."""
    job = _job(worker, plan, ids, name)
    began, first_s = time.perf_counter(), None
    answer: list[int] = []
    end: ChoiceEnd | None = None
    try:
        async with link.generation(worker.address, job, timeout_s=ANSWER_TIMEOUT_S) as generation:
            async for event in generation.events():
                if isinstance(event, Tokens):
                    first_s = first_s if first_s is not None else time.perf_counter() - began
                    answer.extend(event.ids)
                elif isinstance(event, ChoiceEnd):
                    end = event
    except (WorkerFailed, WorkerRefused, ShoalError) as error:
        raise CannotMeasure(f"worker {worker.address} did not answer: {error}") from None
    if first_s is None or end is None or len(answer) != plan.answer_tokens:
        how = "without an end" if end is None else f"by {end.reason.name}: {end.message}"
        raise CannotMeasure(f"worker {worker.address} ended an answer after {len(answer)} tokens, {how}")
    return First(1000 * first_s, answer, end.usage)


def _job(worker: scheduler_pb2.Hello, plan: ColdPlan, ids: list[int], name: str) -> Job:
    return Job(
        meta=Meta(request_id=name, tenant="bench", model=worker.model),
        attempt=1,
        worker_id=worker.worker_id,
        prompt_ids=ids,
        choices={0: ()},
        sampling=Sampling(max_tokens=plan.answer_tokens, temperature=0.0, ignore_eos=True, seed=0),
        tokenizer_digest=worker.tokenizer_digest,
    )


async def _stored(stub: "cache_pb2_grpc.CacheServiceAsyncStub", worker: scheduler_pb2.Hello, ids: list[int]) -> None:
    """Wait until the service holds every block that another worker would look up."""
    root = namespace(worker.model_digest, worker.tokenizer_digest, "", b"")
    keys = chain_keys(root, ids[:-1])
    of = worker.geometry
    geometry = KvGeometry(of.kv_dtype, of.block_tokens, of.layers, of.kv_heads, of.head_dim)
    wanted = cache_pb2.MatchRequest(keys=key_set_message(KeySet(root, tuple(keys), geometry)))
    held, until = 0, time.monotonic() + STORED_WITHIN_S
    while held < len(keys):
        if time.monotonic() > until:
            raise CannotMeasure(
                f"the cache service holds {held} of the prompt's {len(keys)} blocks after {STORED_WITHIN_S:g} s"
            )
        try:
            held = (await stub.Match(wanted, timeout=CALL_S)).leading_blocks
        except grpc.aio.AioRpcError as error:
            raise CannotMeasure(f"the cache service does not answer: {error.details()}") from None
        await asyncio.sleep(LOOK_EVERY_S)


def rows(plan: ColdPlan, rounds: list[Round]) -> Iterator[Row]:
    """The figures of all rounds."""
    cold, shared, device = ([getattr(each, kind).first_ms for each in rounds] for kind in ("cold", "shared", "device"))
    name = f"first token of {plan.prompt_tokens} tokens"
    yield Row(metric=f"{name}, computed", value=median(cold), unit="ms")
    yield Row(metric=f"{name}, from the shared tier (asked twice at another worker)", value=median(shared), unit="ms")
    yield Row(metric=f"{name}, from the device", value=median(device), unit="ms")
    yield Row(
        metric="computed / shared tier, median of pairs",
        value=median(slow / fast for slow, fast in zip(cold, shared, strict=True)),
        unit="times",
        goal=Goal(">=", LEAST_RATIO),
    )
    blocks = (plan.prompt_tokens - 1) // BLOCK_TOKENS
    yield Row(
        metric=f"prompt tokens from the shared tier, least of {len(rounds)}",
        value=min(each.shared.cached(types_pb2.KV_TIER_SHARED) for each in rounds),
        unit="tokens",
        goal=Goal(">=", BLOCK_TOKENS * blocks),
    )
    differ = sum(not each.cold.ids == each.again.ids == each.shared.ids == each.device.ids for each in rounds)
    yield Row(metric="rounds whose four answers differ", value=differ, unit="rounds", goal=Goal("=", 0))
