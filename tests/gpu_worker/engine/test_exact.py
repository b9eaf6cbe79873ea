"""Greedy text equals transformers' in fp32 for 64 prompts, whatever shares the batch. In every other precision a row
depends on its own tokens only: the same ids and the same bits of log-probabilities alone and in every mix.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer

from gpu_worker.engine import torch_engine
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.engine.native_runner import NativeRunner
from gpu_worker.models.registry import PRECISIONS, LoadedModel
from mesh.models import ModelFolder

from .reference import LEAST_GAP, TOKENS, Reference, greedy_along, prompts, references

pytestmark = pytest.mark.timeout(600)  # minutes where others use the cores, too

POOL_BYTES = 512 << 20
SMALL_POOL_BLOCKS = 16  # holds five answers to short prompts
SHORT_PROMPT = 40
TINY_PIECE = 13  # prompt tokens a step: no divisor of a block
FEW_TOKENS = 12
# By what fp32's log-probabilities may differ where sums are added in another order.
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine said to one prompt."""

    ids: list[int]
    logprobs: list[float]

    def first(self, tokens: int) -> "Said":
        return Said(self.ids[:tokens], self.logprobs[:tokens])


Said64 = dict[str, Said]
Mix = Callable[["Stage"], Said64]


class Stage:
    """Engines of one precision around the real model, and prompts for them."""

    def __init__(self, lab, folder: ModelFolder, model: LoadedModel, few: bool) -> None:
        self._lab, self._folder, self._model = lab, folder, model
        self.references = references()[::4] if few else references()
        self.tokens = FEW_TOKENS if few else TOKENS
        self.engine = self.build(kv_bytes=POOL_BYTES)
        self._done: dict[str, Said64] = {}

    def said_in(self, mix: str) -> Said64:
        """What a mix gives, computed once."""
        if mix not in self._done:
            self._done[mix] = MIXES[mix](self)
        return self._done[mix]

    def build(self, **settings) -> BatchingEngine:
        settings = {"max_sequences": 64, "kv_promised": 1000.0, "itl_target_ms": 10_000.0} | settings
        return torch_engine.around(EngineConfig(model=self._folder.name, **settings), self._folder, self._model)

    def block_bytes(self) -> int:
        return -(-POOL_BYTES // self.engine.info.total_blocks)

    def some(self, longest: int = 1000) -> list[Reference]:
        """Sixteen at most, of all lengths up to `longest`: for mixes that take many steps."""
        fitting = [one for one in self.references if len(one.prompt) <= longest]
        return fitting[:: -(-len(fitting) // 16)]

    def submit(self, engine: BatchingEngine, one: Reference, run: str, tokens: int = 0) -> None:
        """Runs share no prefix cache."""
        options = {"max_tokens": tokens or self.tokens, "top_logprobs": 0, "cache_salt": run.encode()}
        engine.submit(self._lab.plan(one.name, one.prompt, **options))

    def said(self, answers) -> Said64:
        by_name: dict[str, list[float]] = {}
        for event in answers.events:
            for logprob in getattr(event, "logprobs", []):
                by_name.setdefault(event.request_id, []).append(logprob.logprob)
        return {name: Said(ids, by_name[name]) for (name, _), ids in answers.ids.items()}

    def finish(self, engine: BatchingEngine, answers=None):
        return self._lab.finish(engine, answers)


def alone(stage: Stage) -> Said64:
    """One after another."""
    said: Said64 = {}
    for one in stage.some():
        stage.submit(stage.engine, one, "alone", FEW_TOKENS)
        said |= stage.said(stage.finish(stage.engine))
    return said


def together(stage: Stage) -> Said64:
    """All at once."""
    for one in stage.references:
        stage.submit(stage.engine, one, "together")
    answers = stage.finish(stage.engine)
    assert max(step.load.running_sequences for step in answers.steps) > len(stage.references) // 2
    return stage.said(answers)


def in_the_middle_of_others(stage: Stage) -> Said64:
    """In random order, some steps apart."""
    rng = random.Random(5)
    waiting = rng.sample(stage.references, len(stage.references))
    answers = stage._lab.answers()
    while waiting:
        for _ in range(rng.randrange(1, 4)):
            if waiting:
                stage.submit(stage.engine, waiting.pop(), "shuffled")
        for _ in range(rng.randrange(1, 3)):
            stage._lab.step(stage.engine, answers)
    return stage.said(stage.finish(stage.engine, answers))


def after_themselves(stage: Stage) -> Said64:
    """Again: now the prompts' whole blocks come from the prefix cache."""
    stage.said_in("together")
    for one in stage.references:
        stage.submit(stage.engine, one, "together")
    answers = stage.finish(stage.engine)
    long = [one for one in stage.references if len(one.prompt) > 16]
    assert all(sum(answers.ends[one.name, 0].usage.cached.values()) >= 16 for one in long)
    return stage.said(answers)


def in_tiny_pieces(stage: Stage) -> Said64:
    """Prompts computed some tokens a step, beside running answers."""
    engine = stage.build(kv_bytes=POOL_BYTES, prefill_chunk=TINY_PIECE)
    for one in stage.some():
        stage.submit(engine, one, "pieces")
    answers = stage.finish(engine)
    assert max(step.prompt_tokens for step in answers.steps) < 2 * TINY_PIECE
    return stage.said(answers)


def preempted(swap_bytes: int) -> Mix:
    """On a pool that holds a few of them: they give way and come back, recomputed or out of the host's memory.

    The prompts are short, so that more begin than can end.
    """

    def mix(stage: Stage) -> Said64:
        engine = stage.build(kv_bytes=SMALL_POOL_BLOCKS * stage.block_bytes(), swap_bytes=swap_bytes)
        assert engine.info.total_blocks <= SMALL_POOL_BLOCKS
        for one in stage.some(SHORT_PROMPT):
            stage.submit(engine, one, "small", TOKENS)
        answers = stage.finish(engine)
        assert answers.steps[-1].load.preemptions
        return stage.said(answers)

    return mix


LONG_MIXES = {"alone", "in_tiny_pieces", "preempted_and_recomputed", "preempted_and_swapped"}
MIXES: dict[str, Mix] = {
    "alone": alone,
    "together": together,
    "in_the_middle_of_others": in_the_middle_of_others,
    "after_themselves": after_themselves,
    "in_tiny_pieces": in_tiny_pieces,
    "preempted_and_recomputed": preempted(0),
    "preempted_and_swapped": preempted(64 << 20),
}


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)


@pytest.fixture(scope="module")
def threads():
    """This file's matmuls are large enough to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exact_stage(lab, real_folder, real_model, threads) -> Stage:
    return Stage(lab, real_folder, real_model("fp32"), few=False)


def test_the_references_are_64_prompts_of_1_to_300_tokens_and_none_hangs_on_a_near_tie(real_folder):
    made = prompts(Tokenizer.from_file(str(real_folder.tokenizer)))
    known = references()
    assert {one.name: one.prompt for one in known} == made
    assert len(known) == 64
    assert {len(one.output) for one in known} == {TOKENS}
    assert (min(map(len, made.values())), max(map(len, made.values()))) == (1, 300)
    assert min(min(one.gaps) for one in known) > LEAST_GAP


def test_some_references_computed_again_by_transformers_are_what_the_file_says(real_reference, threads):
    for one in references()[::8]:
        ids, gaps = greedy_along(real_reference, one.prompt, one.output)
        assert ids == one.output, one.name
        assert gaps == pytest.approx(one.gaps, abs=LEAST_GAP / 2), one.name


@pytest.mark.parametrize("mix", MIXES)
def test_greedy_ids_in_fp32_equal_transformers(exact_stage, mix):
    said, alone = exact_stage.said_in(mix), exact_stage.said_in("alone")
    expected = {one.name: one for one in exact_stage.references}
    assert len(said) >= 10 if mix in LONG_MIXES else len(said) == 64
    both = said.keys() & alone.keys()
    assert both
    for name, one in said.items():
        at = first_difference(one.ids, expected[name].output)
        assert at is None, f"{name}: token {at}, where transformers' gap is {expected[name].gaps[at]}"
        assert len(one.ids) == (FEW_TOKENS if mix == "alone" else TOKENS)
    for name in both:
        assert said[name].logprobs[:FEW_TOKENS] == pytest.approx(alone[name].logprobs, abs=ROUNDING), name


@pytest.fixture(scope="module", params=[name for name in PRECISIONS if name != "fp32"])
def stage(request, lab, real_folder, real_model, threads) -> Stage:
    return Stage(lab, real_folder, real_model(request.param), few=True)


@pytest.mark.parametrize("mix", [name for name in MIXES if name != "alone"])
def test_a_row_has_the_same_bits_alone_and_in_every_mix(stage, mix):
    assert isinstance(stage.engine._runner, NativeRunner), "only the CPU kernels promise it"
    said, alone = stage.said_in(mix), stage.said_in("alone")
    different = [name for name, one in said.items() if one.first(FEW_TOKENS) != alone[name]]
    assert not different, f"{len(different)} of {len(said)}: {different}"
