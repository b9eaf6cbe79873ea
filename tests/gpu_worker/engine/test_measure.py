"""What `python -m gpu_worker.measure` tells, on the tiny model: logits as transformers', and steps of every shape."""

import io
import json
import math

import pytest
import torch
from transformers import LlamaForCausalLM

from gpu_worker.engine.config import EngineConfig
from gpu_worker.measure import limits
from gpu_worker.measure.__main__ import serve
from gpu_worker.measure.logits import logits_of
from gpu_worker.measure.perplexity import negative_log_likelihoods
from gpu_worker.measure.steps import Steps
from gpu_worker.measure.work import parameters

WINDOWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [2, 7, 1, 8]]


@pytest.fixture
def config(tiny_folder) -> EngineConfig:
    return EngineConfig(model=str(tiny_folder.path), precision="fp32", kv_bytes=1 << 20, threads=1)


@pytest.fixture
def reference(tiny_folder) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder.path).eval()


@torch.inference_mode()
def test_logits_of_every_position_equal_transformers(config, reference):
    for ids, ours in zip(WINDOWS, logits_of(config, WINDOWS), strict=True):
        theirs = reference(torch.tensor([ids])).logits[0]
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_windows_likelihood_is_the_loss_that_transformers_tells(config, reference):
    for ids, nll in zip(WINDOWS, negative_log_likelihoods(config, WINDOWS), strict=True):
        loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss  # a mean over predicted tokens
        assert nll == pytest.approx(float(loss) * (len(ids) - 1), rel=1e-4)


def test_steps_are_timed_by_batch_and_context_and_a_shape_that_does_not_fit_is_not(config):
    steps = Steps(config, steps=3)
    for batch, context in ((1, 40), (4, 40), (1, 200)):
        found = steps.median_ms(batch, context)
        assert found is not None
        assert found > 0
    assert steps.median_ms(1, 300) is None  # the model's context is 256
    assert steps.median_ms(10_000, 40) is None


def test_only_a_contexts_last_tokens_are_computed(config):
    steps = Steps(config, steps=3)
    engine, computed = steps._engine, []
    step = engine.step
    engine.step = lambda: computed.append(step()) or computed[-1]
    assert steps.median_ms(2, 200) is not None
    assert sum(result.prompt_tokens for result in computed) <= 2 * 16


def test_the_work_of_a_step_is_told_from_the_configuration(config):
    hidden, inner, layers, vocabulary = 32, 48, 2, 97
    attention = hidden * (32 + 16 + 16 + 32)
    assert parameters(config.model) == layers * (attention + 3 * hidden * inner) + hidden * vocabulary
    work = Steps(config, steps=1).work()
    assert work["weight_bytes"] == 4 * parameters(config.model)
    assert work["kv_bytes_per_token"] == 2 * layers * 2 * 8 * 4  # K and V, two heads of 8 in fp32


def test_the_machines_limits_are_positive_numbers(monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "MATMULS", ((32, 64, 64),))
    assert 0 < limits.read_gb_per_s() < math.inf
    assert 0 < limits.int8_gop_per_s() < math.inf


def test_a_task_says_how_far_it_is_and_then_its_result(config, monkeypatch):
    monkeypatch.setenv("SHOAL_MODEL", config.model)
    monkeypatch.setenv("SHOAL_WORKER_PRECISION", config.precision)
    monkeypatch.setenv("SHOAL_WORKER_KV_BYTES", "1MiB")
    out = io.StringIO()
    assert serve("perplexity", {"windows": WINDOWS}, out) == 0
    *going, last = map(json.loads, out.getvalue().splitlines())
    assert [(line["done"], line["total"]) for line in going] == [(1, 2), (2, 2)]
    assert len(last["result"]["nll"]) == 2


def test_a_setting_that_cannot_be_used_is_an_answer_not_a_crash(config, monkeypatch):
    monkeypatch.setenv("SHOAL_WORKER_PRECISION", "fp7")
    out = io.StringIO()
    assert serve("start", {}, out) == 2
    assert "SHOAL_WORKER_PRECISION" in json.loads(out.getvalue())["error"]
