"""`shoal bench peers`: output tokens a second and first tokens, beside OpenVINO GenAI and vLLM-CPU on the same weights.

Batches of equal prompts go to one engine at a time, round by round, so that what drifts hits all of them; the others
sit idle meanwhile. Shoal and vLLM answer over HTTP, OpenVINO in its own process.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Any

import uvloop

from mesh import models
from mesh.bench import first_token, hf_folder, local_mesh, machine, peer_rows, prompts, tuning, vllm_peer
from mesh.bench.asleep import Asleep
from mesh.bench.contender import OPENVINO, Contender, HttpContender, OpenVinoContender, openvino
from mesh.bench.contest import Contest
from mesh.bench.first_token import Firsts
from mesh.bench.peer_rows import Results
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure, Report, Row
from mesh.bench.tuning import Tuning
from mesh.cli.plan import MeshPlan

SHOAL = "shoal"
WARMUP_TOKENS = 16
THROUGHPUT, FIRST_TOKEN = "throughput", "first-token"
SECTIONS = (THROUGHPUT, FIRST_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersPlan:
    """What is compared. `peers` are "openvino" and "vllm", `only` is some of SECTIONS."""

    model: str
    streams: Sequence[int] = (1, 8, 32)
    rounds: int = 5
    input_tokens: int = 256
    output_tokens: int = 128
    peers: Sequence[str] = ("openvino", "vllm")
    only: Sequence[str] = SECTIONS
    tuning: Tuning = field(default_factory=Tuning)
    seed: int = 0

    @property
    def goals(self) -> peer_rows.Goals:
        """Of throughput; they hold for their own lengths only."""
        lengths = (self.input_tokens, self.output_tokens)
        return peer_rows.LEAST if lengths == peer_rows.GOAL_LENGTHS else {}


@dataclass(slots=True)
class Measured:
    """By section; empty where it was not wanted."""

    results: Results = field(default_factory=dict)
    firsts: Firsts = field(default_factory=dict)


def measure(plan: PeersPlan, command: str) -> Report:
    """Measure. Raises CannotMeasure if Shoal itself cannot be; a peer that cannot is a row with the reason."""
    before = machine.describe()
    env, missing = plan.tuning.env(), dict[str, str]()
    settings = tuning.effective(plan.model, env)
    with ExitStack() as stack:
        mesh = stack.enter_context(local_mesh.running(MeshPlan(model=plan.model), env))
        folder = models.folder_of(plan.model)
        contenders: list[Contender] = [HttpContender(SHOAL, mesh.state.http_url, folder.name)]
        if "vllm" in plan.peers:
            try:
                server = stack.enter_context(vllm_peer.serving(folder))
                asleep = Asleep(server.pid)
                stack.callback(asleep.wake)
                contenders.append(HttpContender(vllm_peer.NAME, server.url, folder.name, asleep))
            except CannotMeasure as reason:
                missing[vllm_peer.NAME] = str(reason)
        measured = uvloop.run(_measure(plan, folder, contenders, missing))
        ran_on = mesh.facts() | tuning.facts(settings) | machine.software() | _peers_facts(contenders, missing)
    found = [*report_rows(plan, measured, missing)]
    return Report(bench="peers", date=machine.now(), machine=before, command=command, ran_on=ran_on, rows=found)


async def _measure(
    plan: PeersPlan, folder: models.ModelFolder, contenders: list[Contender], missing: dict[str, str]
) -> Measured:
    async with AsyncExitStack() as stack:
        if "openvino" in plan.peers:
            try:
                OPENVINO.install()
                contenders.append(await stack.enter_async_context(openvino(hf_folder.gguf_of(folder))))
            except CannotMeasure as reason:
                missing[OpenVinoContender.name] = str(reason)
        measured = Measured()
        if FIRST_TOKEN in plan.only:
            measured.firsts = await first_token.rounds(contenders, missing, plan.rounds, plan.seed)
        if THROUGHPUT in plan.only:
            measured.results = await rounds(plan, contenders, missing)
        return measured


async def rounds(plan: PeersPlan, contenders: Sequence[Contender], missing: dict[str, str]) -> Results:
    """All batches. A peer that fails on the way is put into `missing` and left out from then on."""
    results: Results = {contender.name: {} for contender in contenders}
    rng = random.Random(plan.seed)
    with bar("measuring", len(plan.streams) * (plan.rounds + 1) * len(contenders)) as shown:
        contest = Contest(contenders, missing, shown)
        for streams in plan.streams:
            for number in range(-1, plan.rounds):
                texts = [prompts.text(plan.input_tokens, rng) for _ in range(streams)]
                tokens = WARMUP_TOKENS if number < 0 else plan.output_tokens
                for contender in contenders:
                    batch = await contest.run(contender, texts, tokens, f"{streams} streams")
                    if batch is not None and number >= 0:
                        results[contender.name].setdefault(streams, []).append(batch)
    return {name: found for name, found in results.items() if name not in missing}


def report_rows(plan: PeersPlan, measured: Measured, missing: dict[str, str]) -> Iterator[Row]:
    """All that was measured, goals whose peer is not there, and why it is not."""
    if measured.results:
        yield from peer_rows.rows(measured.results, SHOAL, plan.streams, plan.goals)
        yield from peer_rows.not_compared(measured.results, SHOAL, plan.goals, missing)
        yield from peer_rows.generator(measured.results[SHOAL])
    if measured.firsts:
        yield from first_token.rows(measured.firsts, SHOAL, peer_rows.FIRST_TOKEN)
        yield from first_token.not_compared(measured.firsts, SHOAL, peer_rows.FIRST_TOKEN, missing)
    yield from peer_rows.not_measured(missing)


def _peers_facts(contenders: Sequence[Contender], missing: dict[str, str]) -> dict[str, Any]:
    known = {
        vllm_peer.NAME: f"{vllm_peer.VERSION} in bf16",
        OpenVinoContender.name: f"{OPENVINO.requirement.partition('==')[2]} as it loads the GGUF",
    }
    return {each.name: known[each.name] for each in contenders if each.name in known and each.name not in missing}
