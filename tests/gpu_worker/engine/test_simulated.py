"""The engine that computes nothing: its times, its words, and that it needs neither torch nor weights."""

import json
import re
import subprocess
import sys
from collections import Counter

import pytest
from tokenizers import Tokenizer

from gpu_worker.engine.api import ChoicePlan, Plan, Reason
from gpu_worker.engine.build import pool_blocks, warm_up
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.sequence import Piece, Request, Sequence
from gpu_worker.engine.simulated_engine import CONTEXT_TOKENS, around, facts_of, timing_of
from gpu_worker.engine.simulated_runner import SimulatedRunner
from gpu_worker.engine.simulated_time import TimingModel
from gpu_worker.engine.simulated_words import Words, word_ids
from gpu_worker.models.errors import LoadError, PoolTooSmall
from mesh.errors import InvalidRequest
from mesh.models import ModelFolder
from mesh.sampling import Sampling

TIMING = TimingModel(step_s=0.01, prefill_tokens_per_s=1000, row_s=0.002, context_token_s=0.0001)


def piece(start: int, count: int) -> Piece:
    """Of a sequence whose known ids end with the piece."""
    sampling = Sampling(max_tokens=8, seed=0)
    plan = Plan(request_id="r", attempt=1, prompt_ids=[3] * (start + count), choices=[ChoicePlan(0)], sampling=sampling)
    return Piece(Sequence(Request(plan, b"", 0.0), 0, 0, list(plan.prompt_ids), 0, 1000, computed=start), start, count)


@pytest.mark.parametrize(
    ("pieces", "seconds"),
    [
        ([], 0.01),
        ([piece(0, 100)], 0.01 + 0.1),
        ([piece(100, 100)], 0.01 + 0.1 + 0.01),
        ([piece(50, 1)], 0.01 + 0.002 + 0.005),
        ([piece(50, 1), piece(0, 1), piece(30, 20)], 0.01 + 2 * 0.002 + 0.02 + 0.008),
    ],
)
def test_a_step_takes_what_the_formula_says(pieces, seconds):
    assert TIMING.seconds(pieces) == pytest.approx(seconds)


def test_a_batch_is_far_cheaper_than_its_choices_one_by_one():
    default = timing_of(EngineConfig(model="m"))
    alone, together = default.seconds([piece(999, 1)]), default.seconds([piece(999, 1)] * 64)
    assert 1 / alone == pytest.approx(165, rel=0.02)
    assert 64 / together == pytest.approx(5200, rel=0.02)


def test_the_runner_sleeps_for_the_rest_of_the_time_of_its_step():
    slept = []
    runner = SimulatedRunner(TIMING, Words([5, 6], 0), sleep=slept.append)
    unfinished = Piece(piece(0, 9).sequence, 0, 4)
    outcomes = runner.run([piece(50, 1), unfinished], [2])
    assert [outcome.sampled is not None for outcome in outcomes] == [True, False]
    (rest,) = slept
    wanted = TIMING.seconds([piece(50, 1), unfinished])
    assert wanted - 0.01 < rest < wanted


def sampling(**options) -> Sampling:
    return Sampling(**({"max_tokens": 1000, "seed": 7} | options))


def test_words_depend_on_seed_choice_and_position_only():
    words = Words(range(100), 0)

    def answers(temperature: float) -> set[tuple[int, ...]]:
        return {
            tuple(words.token(sampling(seed=seed, temperature=temperature), choice, at, [2]) for at in range(50))
            for seed in (1, 2)
            for choice in (0, 1)
        }

    assert answers(1) == answers(0.5)
    assert len(answers(1)) == 4
    assert len(answers(0)) == 1  # the likeliest token is the likeliest, whatever the seed


def test_lengths_are_geometric_with_the_mean_that_was_set():
    words = Words(range(10, 100), 20)

    def length(seed: int) -> int:
        return next(at for at in range(10_000) if words.token(sampling(seed=seed), 0, at, [2]) == 2) + 1

    lengths = [length(seed) for seed in range(2000)]
    assert sum(lengths) / 2000 == pytest.approx(20, rel=0.08)
    assert Counter(lengths)[1] / 2000 == pytest.approx(1 / 20, rel=0.35)
    assert max(lengths) > 80


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 200}])
def test_no_answer_ends_by_itself_where_the_request_forbids_it(options):
    words = Words(range(10, 100), 2)
    assert all(words.token(sampling(**options), 0, at, [2]) >= 10 for at in range(200))
    assert any(words.token(sampling(), 0, at, [2]) == 2 for at in range(200))


def test_a_model_without_an_end_token_and_a_mean_of_zero_never_end():
    assert all(Words(range(10, 100), 2).token(sampling(), 0, at, []) >= 10 for at in range(200))
    assert all(Words(range(10, 100), 0).token(sampling(), 0, at, [2]) >= 10 for at in range(2000))


def test_stop_tokens_are_held_back_before_min_tokens_too():
    words, stops = Words(range(10, 14), 0), (10, 11, 12)
    early = {words.token(sampling(min_tokens=50, stop_token_ids=stops), 0, at, [2]) for at in range(50)}
    late = {words.token(sampling(min_tokens=50, stop_token_ids=stops), 0, at, [2]) for at in range(50, 100)}
    assert (early, late) == ({13}, {10, 11, 12, 13})


def test_log_probabilities_are_refused_by_name_and_other_numbers_are_without_effect(simulated_lab):
    engine = simulated_lab.engine()
    with pytest.raises(InvalidRequest, match="simulated") as raised:
        engine.submit(simulated_lab.plan("a", top_logprobs=0))
    assert raised.value.field == "logprobs"
    plain = simulated_lab.answer(engine, simulated_lab.plan("b"))
    bent = {"logit_bias": {5: 100.0}, "frequency_penalty": 2.0, "top_k": 1, "temperature": 1.3}
    assert simulated_lab.answer(engine, simulated_lab.plan("c", **bent)) == plain


def test_an_answer_ends_with_the_models_own_end_token(simulated_lab):
    engine = simulated_lab.engine(simulated_answer_tokens=4.0)
    for seed in range(20):
        engine.submit(simulated_lab.plan(f"r{seed}", seed=seed, max_tokens=200, ignore_eos=False))
    ends = simulated_lab.finish(engine).ends.values()
    assert {(end.reason, end.stop_token_id) for end in ends} == {(Reason.STOP, simulated_lab.eos)}


def test_the_default_models_words_read_as_words(real_folder):
    facts = facts_of(real_folder)
    assert (facts.vocab_size, facts.context_tokens, facts.eos_token_ids) == (49152, 8192, (2,))
    ids = word_ids(real_folder.tokenizer, facts.vocab_size, facts.eos_token_ids)
    assert len(ids) == 1024
    tokenizer = Tokenizer.from_file(str(real_folder.tokenizer))
    assert re.fullmatch(r"( [a-z]{4,})+", tokenizer.decode(ids, skip_special_tokens=False))


def folder(path, tokenizer: dict, config: dict | None = None) -> ModelFolder:
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return ModelFolder("m", path)


VOCAB = {"<s>": 0, "</s>": 1, **{f"▁{'abcdefgh'[i % 8] * (4 + i // 8)}": 2 + i for i in range(64)}, "x": 66}
TOKENIZER = {"model": {"vocab": VOCAB}, "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 1, "content": "</s>"}]}


def test_a_tokenizer_alone_is_enough_of_a_model(tmp_path):
    alone = folder(tmp_path, TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    facts = facts_of(alone)
    assert (facts.vocab_size, facts.context_tokens, facts.eos_token_ids) == (67, CONTEXT_TOKENS, (1,))
    assert word_ids(alone.tokenizer, facts.vocab_size, facts.eos_token_ids) == list(range(2, 66))


def test_controls_and_ids_that_the_model_lacks_are_never_said(tmp_path):
    few = {"model": {"vocab": [["<s>", 0.0], ["▁hello", -1.0], ["x", -2.0], ["y", -3.0]]}}
    few["added_tokens"] = [{"id": 0, "content": "<s>"}]
    assert word_ids(folder(tmp_path, few).tokenizer, 3, [2]) == [1]
    with pytest.raises(LoadError, match="no token"):
        word_ids(folder(tmp_path, few).tokenizer, 1, [])


@pytest.mark.parametrize("config", [{"vocab_size": "many"}, {}, {"vocab_size": 67, "max_position_embeddings": 0}])
def test_a_config_without_its_numbers_is_refused(tmp_path, config):
    with pytest.raises(LoadError, match="expected a number of tokens"):
        facts_of(folder(tmp_path, TOKENIZER, config))


def test_the_pool_has_the_blocks_that_kv_size_and_memory_give(tiny_folder):
    config = EngineConfig(model="m", kind="simulated", kv_bytes=100 << 20, simulated_kv_bytes_per_token=1 << 20)
    info = around(config, tiny_folder).info
    assert (info.total_blocks, info.context_tokens, info.simulated, info.precision) == (6, 96, True, "simulated")


def test_a_pool_too_small_for_a_block_names_its_variable_and_the_least_that_would_do(tiny_folder):
    def sized(kv_bytes):
        return EngineConfig(model="m", kv_bytes=kv_bytes, context_tokens=64, simulated_kv_bytes_per_token=1 << 20)

    with pytest.raises(PoolTooSmall, match=r"^SHOAL_WORKER_KV_BYTES is 1000 bytes.* 16MiB at least.* 64MiB for 64 tok"):
        around(sized(1000), tiny_folder)
    engine = around(sized(16 << 20), tiny_folder)
    warm_up(engine, "m")
    assert engine.info.total_blocks == 1
    with pytest.raises(PoolTooSmall, match=r"^SHOAL_WORKER_KV_SHARE is 0\.25, .* 1000 bytes.* 16MiB at least"):
        pool_blocks(sized(0), tiny_folder.path, 16 << 20, 1000, 64)


def test_neither_real_weights_nor_other_answers_have_its_digest(simulated_lab, torch_lab):
    own = simulated_lab.engine().info.model_digest
    assert own == simulated_lab.engine(blocks=9, simulated_step_ms=3.0).info.model_digest
    assert own != simulated_lab.engine(simulated_answer_tokens=5.0).info.model_digest
    assert own != torch_lab.engine().info.model_digest


def test_its_process_never_imports_torch(real_folder):
    code = f"""
import sys
import gpu_worker.bridge, gpu_worker.worker, gpu_worker.engine.process
from gpu_worker.engine.build import build_engine, warm_up
from gpu_worker.engine.build import pool_blocks, warm_up
from gpu_worker.engine.config import EngineConfig
config = EngineConfig(model={str(real_folder.path)!r}, kind="simulated")
warm_up(build_engine(config, lambda *_: None), config.model)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
