"""Continuous batching beside the naive baseline (`SHOAL_WORKER_POLICY=static`): the same closed batch through both.

Two meshes stand, one works at a time. Every request is there from the start, so latencies hold the wait for a place.
Answers have a length drawn beforehand, and both must give the same text. Peak KV is what the worker's gauge of used
blocks showed at most while the batch ran.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import uvloop

from mesh.bench import gauges, local_mesh, prompts, tuning
from mesh.bench.answer import Ask, Outcome, text_of
from mesh.bench.engine.plan import REQUEST_TIMEOUT_S, EnginePlan, Found, Static
from mesh.bench.generator import Generator
from mesh.bench.http_target import HttpTarget
from mesh.bench.progress import Bar, bar
from mesh.bench.report import CannotMeasure, Goal, Row
from mesh.bench.stats import percentile, ratio_of_pairs
from mesh.bench.target import TargetOptions

STATIC, CONTINUOUS = "static", "continuous"
MIXED, SHARED = "mixed prompts", "a shared system prompt"
LEAST_THROUGHPUT = {MIXED: 2.3, SHARED: 3.25}
MOST_LATENCY, MOST_KV = 0.33, 0.6  # of the static ones, with mixed prompts
WARM_UP_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Served:
    """What one batch gave: `texts` in the order of its requests."""

    tokens_per_s: float
    p99_s: float
    peak_blocks: float
    texts: list[str]


# By kind of prompts and policy, one a round.
Batches = dict[tuple[str, str], list[Served]]


def measure(plan: EnginePlan) -> Found:
    """Raises CannotMeasure if a mesh cannot be started or an answer is not whole."""
    envs = {policy: plan.tuning.env(policy=policy) for policy in (CONTINUOUS, STATIC)}
    settings = {policy: tuning.effective(plan.model, env) for policy, env in envs.items()}
    with ExitStack() as stack:
        meshes = {
            policy: stack.enter_context(local_mesh.running(plan.mesh(), envs[policy]))
            for policy in (CONTINUOUS, STATIC)
        }
        batches = uvloop.run(_batches(plan, meshes))
        facts = meshes[CONTINUOUS].facts()
    told = tuning.facts(settings[CONTINUOUS]) | {"closed batch": f"{plan.static.requests} requests"}
    return Found([*rows(batches)], facts | told)


async def _batches(plan: EnginePlan, meshes: dict[str, local_mesh.LocalMesh]) -> Batches:
    rng, found = random.Random(plan.seed), Batches()
    with bar("static beside continuous", 2 * len(meshes) * (plan.rounds + 1)) as shown:
        for number in range(-1, plan.rounds):
            for kind in (MIXED, SHARED):
                asks = asks_of(plan.static, rng, shared=kind == SHARED)
                for policy, mesh in meshes.items():
                    shown.say(f"{kind}, {policy}")
                    served = await _serve(mesh, asks if number >= 0 else asks[:WARM_UP_REQUESTS], shown)
                    if number >= 0:
                        found.setdefault((kind, policy), []).append(served)
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


async def _serve(mesh: local_mesh.LocalMesh, asks: Sequence[Ask], shown: Bar) -> Served:
    state = mesh.state
    options = TargetOptions(model=state.model, api="completions", timeout_s=REQUEST_TIMEOUT_S)
    async with (
        HttpTarget(state.http_url, options, keep=True) as target,
        gauges.peak_of(mesh.metrics_port("worker"), gauges.USED_BLOCKS) as peak,
    ):
        run = await Generator([target]).closed(iter(asks), streams=len(asks), requests=len(asks), duration_s=None)
    shown.advance()
    for outcome in run.outcomes:
        if outcome.error:
            raise CannotMeasure(f"a request of the batch was not answered: {outcome.error}: {outcome.detail}")
    latencies = [outcome.ended - outcome.due for outcome in run.outcomes]
    return Served(run.tokens / run.wall_s, percentile(latencies, 0.99) or 0.0, peak.value, _texts(run.outcomes))


def _texts(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order in which they were sent: outcomes come in the order in which they ended."""
    return [text_of(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.sent)]


def rows(batches: Batches) -> Iterator[Row]:
    """Each of the continuous mesh's figures beside the static one's."""
    for kind in (MIXED, SHARED):
        ours, theirs = batches[kind, CONTINUOUS], batches[kind, STATIC]
        mixed = kind == MIXED
        pairs = (
            ("output", "tok/s", [one.tokens_per_s for one in ours], [one.tokens_per_s for one in theirs]),
            ("p99 latency", "s", [one.p99_s for one in ours], [one.p99_s for one in theirs]),
            ("peak KV in use", "blocks", [one.peak_blocks for one in ours], [one.peak_blocks for one in theirs]),
        )
        goals = (
            Goal(">=", LEAST_THROUGHPUT[kind], of="ratio"),
            Goal("<=", MOST_LATENCY, of="ratio") if mixed else None,
            Goal("<=", MOST_KV, of="ratio") if mixed else None,
        )
        for (what, unit, mine, other), goal in zip(pairs, goals, strict=True):
            yield _beside(f"{what}, {kind}", unit, mine, other, goal)
        differ = sum(
            a != b for one, two in zip(ours, theirs, strict=True) for a, b in zip(one.texts, two.texts, strict=True)
        )
        yield Row(metric=f"answers that differ, {kind}", value=differ, unit="answers", goal=Goal("=", 0))


def _beside(metric: str, unit: str, ours: list[float], theirs: list[float], goal: Goal | None) -> Row:
    return Row(
        metric=metric,
        value=median(ours),
        unit=unit,
        peer="static batching",
        peer_value=median(theirs),
        pair_ratio=ratio_of_pairs(ours, theirs),
        goal=goal,
    )
