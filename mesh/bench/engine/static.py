"""Continuous batching beside the naive baseline (`SHOAL_WORKER_POLICY=static`): the same requests through both.

Two meshes stand, one works at a time. Continuous batching has less memory: its whole KV pool, cached blocks and all, is
a share of what a static batch of the longest prompt and answer sets aside. All its figures are measured under that cap.

Throughput and KV come from closed batches, where every request is there from the start; latencies there only tell how
long the batch took. So latency is measured in an open loop too: requests arrive by chance (Poisson, the same times for
both) at a share of what static batching can serve. Answers have a length drawn beforehand, and both must give the same
text. Peak KV is what the worker's gauge of used blocks showed at most while the batch ran.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import uvloop

from mesh.bench import gauges, local_mesh, prompts, tuning
from mesh.bench.answer import Ask, Outcome, text_of
from mesh.bench.engine.plan import REQUEST_TIMEOUT_S, EnginePlan, Found, Static
from mesh.bench.engine.static_rows import (
    CONTINUOUS,
    MIXED,
    OPEN,
    SHARED,
    STATIC,
    Batches,
    Pool,
    Served,
    open_rate,
    rows,
)
from mesh.bench.generator import Generator
from mesh.bench.http_target import HttpTarget
from mesh.bench.progress import Bar, bar
from mesh.bench.report import CannotMeasure
from mesh.bench.target import TargetOptions
from mesh.blocks import BLOCK_TOKENS

BATCH = 8  # the static policy's
WARM_UP_REQUESTS = 8
# Static batching makes the last of a batch wait long, in the scheduler's queue too, and nobody is to be turned away.
QUEUE = {"SHOAL_GATEWAY_QUEUE_TIMEOUT_S": "600"}
KV_PROMISED = 1000


def measure(plan: EnginePlan) -> Found:
    """Raises CannotMeasure if a mesh cannot be started, has more KV than it may, or an answer is not whole."""
    with ExitStack() as stack:
        static = stack.enter_context(_mesh(plan, STATIC, plan.static.static_kv_bytes))
        pool = pool_of(plan.static, _total_blocks(static))
        continuous = stack.enter_context(_mesh(plan, CONTINUOUS, pool.total_bytes))
        if (has := _total_blocks(continuous)) > pool.blocks:
            raise CannotMeasure(f"the worker made a pool of {has} blocks where {pool.blocks} were to be the most")
        batches = uvloop.run(_batches(plan, {CONTINUOUS: continuous, STATIC: static}))
        facts = continuous.facts()
    told = tuning.facts(tuning.effective(plan.model, _env(plan, CONTINUOUS, pool.total_bytes))) | {
        "closed batch": f"{plan.static.requests} requests",
        "open loop": f"{plan.static.open_requests} requests, {open_rate(plan.static, batches):.2f} a second",
    }
    return Found([*rows(plan.static, batches, pool)], facts | told)


def _mesh(plan: EnginePlan, policy: str, kv_bytes: int) -> AbstractContextManager[local_mesh.LocalMesh]:
    env = _env(plan, policy, kv_bytes)
    tuning.effective(plan.model, env)
    return local_mesh.running(plan.mesh(), env | QUEUE)


def _env(plan: EnginePlan, policy: str, kv_bytes: int) -> dict[str, str]:
    return plan.tuning.env(policy=policy, kv_bytes=kv_bytes, kv_promised=KV_PROMISED)


def _total_blocks(mesh: local_mesh.LocalMesh) -> int:
    return mesh.workers()[0].hello.total_blocks


def pool_of(shape: Static, static_blocks: int) -> Pool:
    """Continuous batching's pool, given how many blocks static batching's bytes made."""
    longest = max(shape.prompt_tokens) + shape.answer_tokens[1]
    aside = BATCH * -(-longest // BLOCK_TOKENS)
    return Pool(int(shape.pool_share * aside), shape.static_kv_bytes // static_blocks, aside)


async def _batches(plan: EnginePlan, meshes: dict[str, local_mesh.LocalMesh]) -> Batches:
    rng, found = random.Random(plan.seed), Batches()
    open_rounds = max(1, plan.rounds // 2)
    with bar("static beside continuous", len(meshes) * (2 * (plan.rounds + 1) + open_rounds)) as shown:

        async def both(kind: str, asks: list[Ask]) -> None:
            for policy, mesh in meshes.items():
                shown.say(f"{kind}, {policy}")
                served = await _serve(mesh, asks, shown, timed=kind == OPEN)
                found.setdefault((kind, policy), []).append(served)

        for kind in (MIXED, SHARED):
            await both(kind, asks_of(plan.static, rng, shared=kind == SHARED)[:WARM_UP_REQUESTS])
        found.clear()
        for _ in range(plan.rounds):
            for kind in (MIXED, SHARED):
                await both(kind, asks_of(plan.static, rng, shared=kind == SHARED))
        for _ in range(open_rounds):
            await both(OPEN, arriving(plan.static, open_rate(plan.static, found), rng))
    return found


def asks_of(shape: Static, rng: random.Random, *, shared: bool) -> list[Ask]:
    """A batch's requests; with `shared` all begin with the same words, which no earlier batch had."""
    system = prompts.text(shape.system_tokens, rng) + " " if shared else ""
    return [
        Ask(
            prompt=system + prompts.text(rng.choice(shape.prompt_tokens), rng),
            output_tokens=rng.randint(*shape.answer_tokens),
        )
        for _ in range(shape.requests)
    ]


def arriving(shape: Static, rate: float, rng: random.Random) -> list[Ask]:
    """Mixed requests that arrive one by one, `rate` a second."""
    asks = asks_of(replace(shape, requests=shape.open_requests), rng, shared=False)
    return [*prompts.poisson(iter(asks), rate, rng.randrange(1 << 32))]


async def _serve(mesh: local_mesh.LocalMesh, asks: Sequence[Ask], shown: Bar, *, timed: bool) -> Served:
    """The requests all at once or, if `timed`, each at its own time."""
    state, count = mesh.state, len(asks)
    options = TargetOptions(model=state.model, api="completions", timeout_s=REQUEST_TIMEOUT_S)
    async with (
        HttpTarget(state.http_url, options, keep=True) as target,
        gauges.peak_of(mesh.metrics_port("worker"), gauges.USED_BLOCKS) as peak,
    ):
        generator = Generator([target])
        if timed:
            run = await generator.open(asks, most_in_flight=count)
        else:
            run = await generator.closed(iter(asks), streams=count, requests=count, duration_s=None)
    shown.advance()
    for outcome in run.outcomes:
        if outcome.error:
            raise CannotMeasure(f"a request of the batch was not answered: {outcome.error}: {outcome.detail}")
    latencies = [outcome.ended - outcome.due for outcome in run.outcomes]
    return Served(run.tokens / run.wall_s, count / run.wall_s, latencies, peak.value, _texts(run.outcomes))


def _texts(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order in which they were sent: outcomes come in the order in which they ended."""
    return [text_of(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.sent)]
