"""Running streams while a long prompt enters: what it costs them, and what they cost it.

Each round: a long prompt alone; then the streams, undisturbed for a while; then another long prompt beside them. So
both figures have their peer in the same round. Gaps are those that a client sees over HTTP. A preset has a mesh of its
own; its limits are raised so far that the prompt fits beside the streams, the rest is the preset's.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import uvloop

from mesh.bench import local_mesh, prompts, tuning
from mesh.bench.answer import Ask, Outcome
from mesh.bench.engine.plan import REQUEST_TIMEOUT_S, EnginePlan, Found
from mesh.bench.engine.streams import Stream, idle, running, within
from mesh.bench.http_target import HttpTarget
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure, Goal, Row
from mesh.bench.stats import percentile, ratio_of_pairs
from mesh.bench.target import TargetOptions
from mesh.bench.tuning import Tuning

# Times the undisturbed gap, and times the first token alone.
GOALS = {"latency": (2.0, 2.3), "throughput": (4.0, 1.5)}
MORE_SEQUENCES = 8  # than streams may run, so that the prompt needs not wait for one to end
OUTPUT_TOKENS = 8  # of the prompt's answer
ENOUGH_GAPS = 1000  # for a 99th percentile
WARM_UP_TOKENS, WARM_UP_S = 512, 0.5


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds: first tokens of the prompt alone and beside the streams, and the streams' gaps before and meanwhile."""

    alone_s: float
    beside_s: float
    undisturbed: list[float]
    disturbed: list[float]


def measure(plan: EnginePlan) -> Found:
    """Raises CannotMeasure if a mesh cannot be started or does not answer."""
    found = Found()
    shape = plan.interference
    for preset in shape.presets:
        limits = {"context_tokens": shape.context_tokens, "max_sequences": shape.streams + MORE_SEQUENCES}
        env = Tuning(precision=plan.tuning.precision, preset=preset).env(**limits)
        tuning.effective(plan.model, env)
        with local_mesh.running(plan.mesh(), env) as mesh:
            rounds = uvloop.run(_rounds(plan, preset, mesh))
            found.facts |= mesh.facts() | {"interference": ", ".join(f"{n} {v}" for n, v in limits.items())}
        found.rows += rows(plan, preset, rounds)
    return found


async def _rounds(plan: EnginePlan, preset: str, mesh: local_mesh.LocalMesh) -> list[Round]:
    # The model must not end its answer, nor say what has no text: gaps are counted between pieces of text.
    more = {"ignore_eos": False, "min_tokens": plan.interference.stream_tokens}
    model, url, port = mesh.state.model, mesh.state.http_url, mesh.metrics_port("worker")
    options = TargetOptions(model=model, api="completions", timeout_s=REQUEST_TIMEOUT_S)
    endless = TargetOptions(model=model, api="completions", timeout_s=REQUEST_TIMEOUT_S, more=more)
    rng, found = random.Random(plan.seed), []
    async with HttpTarget(url, options) as target, HttpTarget(url, endless) as streaming:
        with bar(f"interference, preset {preset}", plan.rounds + 1) as shown:
            for number in range(-1, plan.rounds):
                one = await _round(plan, (target, streaming), port, rng, warm_up=number < 0)
                if number >= 0:
                    found.append(one)
                shown.advance()
    return found


async def _round(
    plan: EnginePlan, targets: tuple[HttpTarget, HttpTarget], port: int, rng: random.Random, *, warm_up: bool
) -> Round:
    """`targets`: for the prompt, for the streams."""
    shape = plan.interference
    tokens = min(shape.prompt_tokens, WARM_UP_TOKENS) if warm_up else shape.prompt_tokens
    alone_s = await _first_s(targets[0], tokens, rng)
    asks = [
        Ask(prompt=prompts.text(shape.stream_prompt_tokens, rng), output_tokens=shape.stream_tokens)
        for _ in range(shape.streams)
    ]
    async with running(targets[1], asks) as streams:
        began, sent = await streams.undisturbed(WARM_UP_S if warm_up else shape.window_s)
        beside_s = await _first_s(targets[0], tokens, rng)
        await streams.each_past(sent + beside_s)
    await idle(port)
    return Round(
        alone_s,
        beside_s,
        [gap for stream in streams.all for gap in within(stream.gaps, began, sent)],
        [gap for stream in streams.all for gap in _meanwhile(stream, sent, sent + beside_s)],
    )


def _meanwhile(stream: Stream, since: float, until: float) -> list[float]:
    """Gaps of which some part lies between."""
    return [gap for end, gap in stream.gaps if end > since and end - gap < until]


async def _first_s(target: HttpTarget, tokens: int, rng: random.Random) -> float:
    """Of a prompt that nobody has seen. Returns when its answer has ended."""
    ask = Ask(prompt=prompts.text(tokens, rng), output_tokens=OUTPUT_TOKENS)
    outcome = Outcome.now()
    await target.ask(ask, outcome, lambda gap: None)
    if outcome.error or outcome.first is None:
        raise CannotMeasure(f"the prompt of {tokens} tokens was not answered: {outcome.error}: {outcome.detail}")
    return outcome.first - outcome.sent


def rows(plan: EnginePlan, preset: str, rounds: list[Round]) -> Iterator[Row]:
    """The streams' gaps and the prompt's first token, each beside its own undisturbed."""
    shape, (most_gap, most_first) = plan.interference, GOALS[preset]
    before, meanwhile = [_p99(each.undisturbed) for each in rounds], [_p99(each.disturbed) for each in rounds]
    least = min(min(len(each.undisturbed), len(each.disturbed)) for each in rounds)
    counted = f"at least {least} gaps a round on either side"
    yield Row(
        metric=f"p99 gap of {shape.streams} streams while {shape.prompt_tokens:,} tokens enter, preset {preset}",
        value=1000 * median(meanwhile),
        unit="ms",
        peer="undisturbed",
        peer_value=1000 * median(before),
        pair_ratio=ratio_of_pairs(meanwhile, before),
        goal=Goal("<=", most_gap, of="ratio"),
        note=counted if least >= ENOUGH_GAPS else f"{counted}: too few for a 99th percentile",
    )
    alone, beside = [each.alone_s for each in rounds], [each.beside_s for each in rounds]
    yield Row(
        metric=f"first token of {shape.prompt_tokens:,} tokens beside {shape.streams} streams, preset {preset}",
        value=1000 * median(beside),
        unit="ms",
        peer="alone",
        peer_value=1000 * median(alone),
        pair_ratio=ratio_of_pairs(beside, alone),
        goal=Goal("<=", most_first, of="ratio"),
    )


def _p99(gaps: list[float]) -> float:
    found = percentile(gaps, 0.99)
    if found is None:
        raise CannotMeasure("the streams gave no token in a whole round")
    return found
