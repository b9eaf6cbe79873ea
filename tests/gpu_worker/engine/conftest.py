"""Engines for tests: a tiny random Llama made here, and the real model where it was pulled."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gpu_worker.engine import simulated_engine, torch_engine
from gpu_worker.engine.api import ChoicePlan, Event, FinishedEvent, Plan, StepResult, TokensEvent
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.models.registry import LoadedModel, load
from mesh.blocks import BLOCK_TOKENS
from mesh.models import DEFAULT_MODEL, ModelFolder, cache_dir
from mesh.sampling import Sampling

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB = 97
EOS = 2


def silent(fraction: float, what: str) -> None:
    """A progress callback that reports nothing."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny model's matmuls are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A random Llama of two layers, saved by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=EOS,
        bos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return ModelFolder("tiny", path)


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: ModelFolder) -> LoadedModel:
    return load(tiny_folder, torch.device("cpu"), "fp32", silent)


@dataclass
class Answers:
    """What a run has answered, by (request, choice). Checks that positions neither gap nor repeat."""

    ids: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], FinishedEvent] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    _next: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def take(self, result: StepResult) -> None:
        self.steps.append(result)
        self.events += result.events
        for event in result.events:
            if isinstance(event, TokensEvent):
                stream = (event.request_id, event.choice, event.attempt)
                assert event.position == self._next.get(stream, event.position), "a gap or a repeat"
                self._next[stream] = event.position + len(event.ids)
                self.ids.setdefault(stream[:2], []).extend(event.ids)
            elif isinstance(event, FinishedEvent):
                assert (event.request_id, event.choice) not in self.ends, "ended twice"
                self.ends[event.request_id, event.choice] = event


class Lab:
    """Makes engines around the tiny model, and plans for them."""

    vocab = VOCAB
    eos = EOS
    answers = Answers

    def __init__(self, folder: ModelFolder, model: LoadedModel) -> None:
        self.folder = folder
        self.model = model

    def engine(self, blocks: int = 256, **settings: Any) -> BatchingEngine:
        """`blocks` sizes the pool; other settings are EngineConfig's."""
        block_bytes = self.model.decoder.kv_shape.block_bytes(torch.float32)
        settings = {"kv_promised": 1000.0} | settings
        return torch_engine.around(
            EngineConfig(model="tiny", kv_bytes=blocks * block_bytes, **settings), self.folder, self.model
        )

    def plan(self, request_id: str = "r", prompt: list[int] | None = None, **options: Any) -> Plan:
        """A greedy plan of one choice; options that are not the plan's own (`names`) are Sampling's."""
        names = ("attempt", "choices", "cache_salt", "adapter", "fetched")
        of_plan = {"attempt": 1, "choices": [ChoicePlan(0)]} | {n: options.pop(n) for n in names if n in options}
        sampling = {"max_tokens": 8, "temperature": 0.0, "seed": 0, "ignore_eos": True} | options
        prompt = [3, 4, 5] if prompt is None else prompt
        return Plan(request_id=request_id, prompt_ids=prompt, sampling=Sampling(**sampling), **of_plan)

    def step(self, engine: BatchingEngine, answers: Answers) -> StepResult:
        """One step, with the pool's invariant checked."""
        result = engine.step()
        load = result.load
        assert load.free_blocks + load.cached_blocks + load.used_blocks == load.total_blocks
        engine.pool.check()
        answers.take(result)
        return result

    def finish(self, engine: BatchingEngine, answers: Answers | None = None) -> Answers:
        """Step until idle."""
        answers = answers or Answers()
        while engine.has_work():
            self.step(engine, answers)
        assert engine.pool.used == 0, "blocks are held at idle"
        return answers

    def answer(self, engine: BatchingEngine, plan: Plan) -> list[int]:
        """The output ids of one plan of one choice, run to its end."""
        engine.submit(plan)
        return self.finish(engine).ids.get((plan.request_id, plan.choices[0].index), [])


class SimulatedLab(Lab):
    """The same, around no model at all: the engine's own work, with nothing computed and no time taken."""

    def engine(self, blocks: int = 256, **settings: Any) -> BatchingEngine:
        instant = {f"simulated_{name}": 0 for name in ("step_ms", "row_us", "context_us")}
        instant |= {"simulated_prefill_tokens_per_s": math.inf, "simulated_kv_bytes_per_token": 1}
        settings = {"kv_promised": 1000.0, "kv_bytes": blocks * BLOCK_TOKENS} | instant | settings
        return simulated_engine.around(EngineConfig(model="tiny", kind="simulated", **settings), self.folder)


@pytest.fixture(scope="session")
def torch_lab(tiny_folder: ModelFolder, tiny_model: LoadedModel) -> Lab:
    return Lab(tiny_folder, tiny_model)


@pytest.fixture(scope="session")
def plain_lab(tiny_folder: ModelFolder) -> Lab:
    """With torch's operators, whose decoder can be replaced by one that breaks."""
    return Lab(tiny_folder, load(tiny_folder, torch.device("cpu"), "fp32", silent, "torch"))


@pytest.fixture(scope="session")
def simulated_lab(tiny_folder: ModelFolder, tiny_model: LoadedModel) -> Lab:
    return SimulatedLab(tiny_folder, tiny_model)


@pytest.fixture(scope="session")
def lab(torch_lab: Lab) -> Lab:
    """The lab that computes. Files whose tests are about the engine's own work override it by both."""
    return torch_lab


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture(scope="session")
def real_folder() -> ModelFolder:
    """The pulled default model."""
    folder = ModelFolder(DEFAULT_MODEL, cache_dir() / "models" / DEFAULT_MODEL)
    if not folder.tokenizer.is_file():
        pytest.fail(f"the model {DEFAULT_MODEL} is not here: run `shoal pull {DEFAULT_MODEL}` (`make test` does)")
    return folder


@pytest.fixture(scope="session")
def real_model(real_folder: ModelFolder) -> Callable[[str], LoadedModel]:
    """`real_model(precision)`: the default model, read once for all who ask."""
    return functools.cache(lambda precision: load(real_folder, torch.device("cpu"), precision, silent))


@pytest.fixture(scope="session")
def real_reference(real_folder: ModelFolder) -> "LlamaForCausalLM":
    """The default model as transformers computes it."""
    from .reference import transformers_model

    return transformers_model(real_folder)
