"""`shoal bench load`: closed or open loop, or a trace replayed, against OpenAI URLs or Shoal's gRPC."""

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from mesh.bench import machine, prompts, traces
from mesh.bench.answer import Ask
from mesh.bench.generator import Generator, Run
from mesh.bench.grpc_target import GrpcTarget, models_of_grpc
from mesh.bench.http_target import HttpTarget, models_at
from mesh.bench.load_rows import rows
from mesh.bench.progress import Bar, bar
from mesh.bench.report import CannotMeasure, Report, Row
from mesh.bench.target import Target, TargetOptions

GRPC = "grpc://"
MOST_REQUESTS = 1_000_000  # where nobody says how many


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is sent where. With `trace` its lengths and times count, with `rate` the loop is open, else closed."""

    urls: Sequence[str]
    model: str | None = None
    api: str = "chat"
    streams: int = 8
    rate: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup: int | None = None  # requests before the measured ones; None = as many as streams
    input_tokens: int = 256
    output_tokens: int = 128
    ignore_eos: bool = True
    trace: Path | None = None
    speedup: float = 1.0
    limit: int | None = None
    input_cap: int | None = None
    max_in_flight: int = 1024
    timeout_s: float = 300.0
    api_key: str | None = None
    ca: str | None = None
    seed: int = 0

    @property
    def over_grpc(self) -> bool:
        return any(url.startswith(GRPC) for url in self.urls)


def measure(plan: LoadPlan, command: str) -> Report:
    """Run the load. Raises CannotMeasure if the target is not there or answers nothing at all."""
    model, facts = _served(plan)
    before = machine.describe()
    run, notes = uvloop.run(_run(plan, model))
    report = Report(
        bench="load",
        date=machine.now(),
        machine=before,
        command=command,
        ran_on={"target": " ".join(plan.urls), "model": model, **facts, **machine.software(("shoal",))},
        rows=[*notes, *rows(run, lean=not plan.over_grpc)],
    )
    return report


def _served(plan: LoadPlan) -> tuple[str, dict[str, Any]]:
    """The model to ask for, and what its server tells of the engine."""
    first = plan.urls[0]
    if first.startswith(GRPC):
        models: dict[str, bool | None] = {
            m.name: m.simulated for m in models_of_grpc(first.removeprefix(GRPC), plan.api_key, plan.ca)
        }
    elif plan.model is not None and plan.api_key is not None:
        return plan.model, {}  # hosted services list many models, or none
    else:
        models = {str(entry.get("id")): entry.get("simulated") for entry in models_at(first, plan.api_key, plan.ca)}
    name = plan.model or next(iter(models))
    if plan.model is None and len(models) > 1:
        raise CannotMeasure(f"{first} serves {', '.join(sorted(models))}: choose one with --model")
    simulated = models.get(name)
    return name, {} if simulated is None else {"engine": "simulated" if simulated else "real"}


async def _run(plan: LoadPlan, model: str) -> tuple[Run, list[Row]]:
    measured, notes = _asks(plan)
    async with _targets(plan, model) as targets:
        await _warm_up(plan, targets)
        total = plan.requests if plan.trace is None and plan.rate is None else None
        with bar("load", total) as shown:
            return await _measured(plan, targets, measured, shown), notes


async def _measured(plan: LoadPlan, targets: Sequence[Target], asks: Iterator[Ask], shown: Bar) -> Run:
    generator = Generator(targets, shown.advance, lambda: shown.cpu_s)
    if plan.trace is not None or plan.rate is not None:
        return await generator.open(asks, most_in_flight=plan.max_in_flight)
    requests = plan.requests or MOST_REQUESTS
    return await generator.closed(asks, streams=plan.streams, requests=requests, duration_s=plan.duration_s)


def _asks(plan: LoadPlan) -> tuple[Iterator[Ask], list[Row]]:
    """The requests in their order, and what is to be told of them."""
    shape = prompts.endless(plan.input_tokens, plan.output_tokens, plan.seed)
    if plan.trace is None:
        if plan.rate is None:
            return shape, []
        return _bounded(plan, prompts.poisson(shape, plan.rate, plan.seed)), []
    recorded = traces.read(plan.trace, plan.limit)
    cut = sum(row.input_tokens > plan.input_cap for row in recorded) if plan.input_cap is not None else 0
    spread = traces.spread(recorded, plan.seed)
    asks = traces.asks(spread, speedup=plan.speedup, most_input=plan.input_cap, seed=plan.seed)
    told = [Row(metric="requests of the trace", value=len(recorded), unit="requests")]
    if cut:
        told.append(Row(metric="of them, prompts cut by --input-cap", value=cut, unit="requests"))
    return _bounded(plan, asks), told


def _bounded(plan: LoadPlan, asks: Iterator[Ask]) -> Iterator[Ask]:
    """As many as are wanted, and those that are due in the time that is."""
    if plan.duration_s is not None:
        until_s = plan.duration_s
        asks = itertools.takewhile(lambda ask: ask.at_s < until_s, asks)
    return itertools.islice(asks, plan.requests or MOST_REQUESTS)


async def _warm_up(plan: LoadPlan, targets: Sequence[Target]) -> None:
    """Requests that are not measured. One that fails has its say: nothing after it would be worth measuring."""
    count = plan.warmup if plan.warmup is not None else min(plan.streams, 8)
    if not count:
        return
    asks = prompts.endless(plan.input_tokens, plan.output_tokens, plan.seed + 1_000_003)
    with bar("warm-up", count) as shown:
        run = await Generator(targets, shown.advance).closed(
            asks, streams=min(count, plan.streams), requests=count, duration_s=None
        )
    if not run.whole:
        worst = run.outcomes[0]
        raise CannotMeasure(f"no request of the warm-up was answered whole: {worst.error}: {worst.detail}")


@asynccontextmanager
async def _targets(plan: LoadPlan, model: str) -> AsyncIterator[list[Target]]:
    options = TargetOptions(
        model=model,
        api=plan.api,
        ignore_eos=plan.ignore_eos,
        api_key=plan.api_key,
        ca=plan.ca,
        timeout_s=plan.timeout_s,
    )
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_target(url, options)) for url in plan.urls]


def _target(url: str, options: TargetOptions) -> GrpcTarget | HttpTarget:
    return GrpcTarget(url.removeprefix(GRPC), options) if url.startswith(GRPC) else HttpTarget(url, options)
