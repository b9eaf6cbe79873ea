"""Output tokens a second by precision: what the default is chosen by. A mesh for each, one of them works at a time."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from statistics import median

import uvloop

from mesh.bench import local_mesh, peers, tuning
from mesh.bench.contender import Contender, HttpContender
from mesh.bench.engine.plan import EnginePlan, Found
from mesh.bench.peer_rows import Results, not_measured, throughput
from mesh.bench.report import CannotMeasure, Row
from mesh.bench.tuning import Tuning

FIRST_MS = 1000.0


def measure(plan: EnginePlan) -> Found:
    """A precision that cannot be served is a row with the reason. Raises CannotMeasure if none can."""
    missing: dict[str, str] = {}
    contenders: list[Contender] = []
    with ExitStack() as stack:
        for precision in plan.precisions:
            env = Tuning(precision=precision, preset=plan.tuning.preset).env()
            try:
                tuning.effective(plan.model, env)
                mesh = stack.enter_context(local_mesh.running(plan.mesh(), env))
            except CannotMeasure as reason:
                missing[precision] = str(reason)
                continue
            contenders.append(HttpContender(precision, mesh.state.http_url, mesh.state.model))
        if not contenders:
            raise CannotMeasure("; ".join(dict.fromkeys(missing.values())))
        shape = peers.PeersPlan(model=plan.model, streams=plan.streams, rounds=plan.rounds, seed=plan.seed)
        results = uvloop.run(peers.rounds(shape, contenders, missing))
    return Found([*rows(results, missing)], {"tokens in, out": f"{shape.input_tokens}, {shape.output_tokens}"})


def rows(results: Results, missing: Mapping[str, str]) -> Iterator[Row]:
    """Each precision by streams, all but the first beside the first."""
    first, *others = results
    for streams, ours in results[first].items():
        yield _named(first, throughput(streams, ours, None, None, None))
        for name in others:
            yield _named(name, throughput(streams, results[name][streams], first, ours, None))
    for streams in results[first]:
        for name, found in results.items():
            firsts = [FIRST_MS * first_s for batch in found[streams] for first_s in batch.first_s]
            metric = f"first token p50 of {streams} stream{'s' if streams > 1 else ''}, {name}"
            yield Row(metric=metric, value=median(firsts), unit="ms")
    yield from not_measured(missing)


def _named(precision: str, row: Row) -> Row:
    """`throughput`'s row, said of a precision."""
    what = row.metric.replace(", ", " of ")
    return Row(
        metric=f"{what}, {precision}",
        value=row.value,
        unit=row.unit,
        peer=row.peer,
        peer_value=row.peer_value,
        pair_ratio=row.pair_ratio,
    )
