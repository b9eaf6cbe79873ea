"""`shoal bench gateway`: what the mesh itself costs, with an engine that computes nothing, beside vLLM's API server.

Slices of 16-token answers alternate with slices of longer ones, and Shoal's with the peer's, so that one run tells
requests from tokens and ours from theirs. Of vLLM only the API server's process counts, not its engine core.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median

import uvloop

from mesh import models
from mesh.bench import local_mesh, machine, vllm_peer
from mesh.bench.cpu import RoleClock, seconds
from mesh.bench.http_target import HttpTarget
from mesh.bench.progress import Bar, bar
from mesh.bench.report import CannotMeasure, Goal, Report, Row
from mesh.bench.slices import GENERATOR, Shape, Slice, errors, run_slice, split
from mesh.bench.stats import ratio_of_pairs
from mesh.bench.target import Target, TargetOptions
from mesh.cli.plan import MeshPlan

API_SERVER = "API server"
ROLES = ("gateway", "scheduler", "worker", "engine", "redis", GENERATOR)
LEAST_REQUESTS_PER_S = 150
# The engine must not be what limits the requests: prompts cost it next to nothing, steps what they cost by default.
PREFILL_TOKENS_PER_S = 200_000
ENGINE = {"SHOAL_WORKER_SIMULATED_PREFILL_TOKENS_PER_S": str(PREFILL_TOKENS_PER_S)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """How it is measured. The peer's slices are longer: its real engine gives fewer tokens a second."""

    model: str
    peer: bool = True
    gateways: int = 2
    streams: int = 48
    pairs: int = 5
    slice_s: float = 5.0
    peer_slice_s: float = 10.0
    input_tokens: int = 16
    short_tokens: int = 16
    long_tokens: int = 64


@dataclass(slots=True)
class Side:
    """One of the two that are compared: where requests go, and how CPU is read. `slices` come short, long, short …"""

    urls: Sequence[str]
    read_cpu: Callable[[], dict[str, float]]
    slice_s: float
    slices: list[Slice]

    def of_length(self, tokens: int) -> list[Slice]:
        return [each for each in self.slices if each.output_tokens == tokens]

    def pairs(self) -> list[list[Slice]]:
        """Each short slice with the long one after it."""
        return [self.slices[start : start + 2] for start in range(0, len(self.slices), 2)]

    def us_per_token(self, role: str) -> list[float]:
        """One figure for each pair, µs."""
        return [1e6 * split(pair, role)[1] for pair in self.pairs()]


def measure(plan: GatewayPlan, command: str) -> Report:
    """Measure. Raises CannotMeasure if the mesh cannot be started; a peer that cannot is a row with the reason."""
    before = machine.describe()
    mesh_plan = MeshPlan(model=plan.model, engine="simulated", gateways=plan.gateways, caches=0)
    with _peer(plan) as (theirs, reason), local_mesh.running(mesh_plan, ENGINE) as mesh:
        state = mesh.state
        ours = Side(state.http_urls, RoleClock(state.processes).read, plan.slice_s, [])
        uvloop.run(_measure(plan, state.model, ours, theirs))
        ran_on = (
            mesh.facts()
            | {
                "prefill tokens/s": PREFILL_TOKENS_PER_S,
                "streams": plan.streams,
                "slices": f"{plan.pairs} of {plan.slice_s:g} s, medians",
            }
            | _peer_fact(theirs)
            | machine.software()
        )
    rows = [*throughput(plan, ours), *costs(plan, ours), *beside(ours, theirs, reason)]
    return Report(
        bench="gateway", date=machine.now(), machine=before, command=command, ran_on=ran_on, rows=rows
    )  # fmt: skip


def _peer_fact(theirs: Side | None) -> dict[str, str]:
    return {} if theirs is None else {vllm_peer.NAME: vllm_peer.VERSION}


@contextmanager
def _peer(plan: GatewayPlan) -> Iterator[tuple[Side | None, str]]:
    """vLLM's side, or None and why not."""
    with ExitStack() as stack:
        side, reason = None, ""
        if plan.peer:
            try:
                server = stack.enter_context(vllm_peer.serving(models.folder_of(plan.model)))
                process = server.api_server()
                side = Side([server.url], lambda: {API_SERVER: seconds(process)}, plan.peer_slice_s, [])
            except CannotMeasure as missing:
                reason = str(missing)
        yield side, reason


async def _measure(plan: GatewayPlan, model: str, ours: Side, theirs: Side | None) -> None:
    sides = [ours] if theirs is None else [ours, theirs]
    async with AsyncExitStack() as stack:
        options = TargetOptions(model=model)
        targets: list[list[Target]] = [
            [await stack.enter_async_context(HttpTarget(url, options)) for url in side.urls] for side in sides
        ]
        with bar("measuring", 2 * len(sides) * (plan.pairs + 1)) as shown:
            for pair in range(-1, plan.pairs):
                for side, of_side in zip(sides, targets, strict=True):
                    await _pair(plan, side, of_side, pair, shown)


async def _pair(plan: GatewayPlan, side: Side, targets: Sequence[Target], pair: int, shown: Bar) -> None:
    """A short and a long slice; pair -1 is the warm-up and is not kept."""
    for tokens in (plan.short_tokens, plan.long_tokens):
        shape = Shape(
            streams=plan.streams,
            input_tokens=plan.input_tokens,
            output_tokens=tokens,
            seconds=side.slice_s if pair >= 0 else side.slice_s / 2,
        )
        found = await run_slice(targets, shape, side.read_cpu, seed=1000 * (pair + 2) + tokens)
        if not found.requests:
            raise CannotMeasure(f"no request was answered whole by {side.urls[0]}: {found.errors}")
        if pair >= 0:
            side.slices.append(found)
        shown.advance()


def throughput(plan: GatewayPlan, ours: Side) -> Iterator[Row]:
    """Requests and tokens a second, and errors."""
    short, long = ours.of_length(plan.short_tokens), ours.of_length(plan.long_tokens)
    yield Row(
        metric=f"requests of {plan.short_tokens} streamed tokens",
        value=median(each.requests_per_s for each in short),
        unit="1/s",
        goal=Goal(">=", LEAST_REQUESTS_PER_S),
    )
    yield Row(
        metric=f"output of {plan.long_tokens}-token answers",
        value=median(each.tokens / each.wall_s for each in long),
        unit="tok/s",
    )
    found = errors(ours.slices)
    said = ", ".join(f"{kind}: {count}" for kind, count in found.items())
    yield Row(metric="errors", value=sum(found.values()), unit="requests", goal=Goal("=", 0), note=said)
    yield Row(metric="requests measured", value=sum(each.requests for each in ours.slices), unit="requests")


def costs(plan: GatewayPlan, ours: Side) -> Iterator[Row]:
    """CPU of every role, split into a part per request and one per token."""
    short = ours.of_length(plan.short_tokens)
    requests = sum(each.requests for each in short)
    total = sum(sum(each.cpu_s.values()) for each in short)
    yield Row(
        metric=f"CPU of a {plan.short_tokens}-token request, all processes", value=1e3 * total / requests, unit="ms"
    )
    parts = {role: split(ours.slices, role) for role in ROLES if role in ours.slices[0].cpu_s}
    for role, (per_request, _) in parts.items():
        yield Row(metric=f"CPU per request, {role}", value=1e3 * per_request, unit="ms")
    for role, (_, per_token) in parts.items():
        yield Row(metric=f"CPU per token, {role}", value=1e6 * per_token, unit="µs")


def beside(ours: Side, theirs: Side | None, reason: str) -> Iterator[Row]:
    """The promise: a streamed token costs our gateway less than it costs vLLM's API server."""
    if theirs is None and not reason:
        return
    mine = ours.us_per_token("gateway")
    row = Row(
        metric="gateway CPU per token", value=median(mine), unit="µs", peer=vllm_peer.NAME, goal=Goal("<", of="peer")
    )
    if theirs is None:
        yield replace(row, note=f"not compared: {reason}")
        return
    others = theirs.us_per_token(API_SERVER)
    yield replace(row, peer_value=median(others), pair_ratio=ratio_of_pairs(mine, others))
    yield Row(
        metric="gateway CPU per request",
        value=1e3 * split(ours.slices, "gateway")[0],
        unit="ms",
        peer=vllm_peer.NAME,
        peer_value=1e3 * split(theirs.slices, API_SERVER)[0],
    )
