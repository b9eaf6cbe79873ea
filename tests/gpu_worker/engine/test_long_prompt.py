"""Fault B12: a long prompt neither stops the streams that run nor short prompts that come after it.

The engine is the real one; time is the timing model's, so the gaps are exact and no test waits.
"""

import json
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from gpu_worker.engine.api import TokensEvent
from gpu_worker.engine.build import warm_up
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.engine.presets import PRESETS
from gpu_worker.engine.runner import Outcome
from gpu_worker.engine.sequence import Piece
from mesh.models import ModelFolder

STREAMS, SHORTS, LONG_TOKENS = 32, 10, 6000
# A small model on two cores: 34 ms a step at 32 streams of some 100 tokens, 2,000 prompt tokens a second.
COSTS = {
    "simulated_step_ms": 5.0,
    "simulated_row_us": 850.0,
    "simulated_context_us": 0.3,
    "simulated_prefill_tokens_per_s": 2000.0,
}


@dataclass
class Timeline:
    """An engine under a clock that only its own steps move, and when each token came."""

    engine: BatchingEngine
    now_s: float = 0.0
    tokens_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._runner, self.engine._runner = self.engine._runner, self
        self._runner._sleep, self.engine._clock = lambda _: None, lambda: self.now_s
        self.check, self.clear, self.parts = self._runner.check, self._runner.clear, self._runner.parts
        warm_up(self.engine, "the model")

    def run(self, pieces: Many[Piece], ending_ids: Many[int]) -> list[Outcome]:
        """The runner's, in no time but the timing model's."""
        self.now_s += self._runner._timing.seconds(pieces)
        return self._runner.run(pieces, ending_ids)

    def step(self) -> None:
        for event in self.engine.step().events:
            if isinstance(event, TokensEvent):
                self.tokens_s.setdefault(event.request_id, []).append(self.now_s)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.step()

    def streaming(self, lab, count: int = STREAMS) -> list[str]:
        """So many streams that run and go on for long, all of them in the middle of their answers."""
        names = [f"stream-{n}" for n in range(count)]
        for n, name in enumerate(names):
            self.engine.submit(lab.plan(name, [3 + (n + at) % 90 for at in range(64)], max_tokens=4000))
        self.until(lambda: all(len(self.tokens_s.get(name, [])) > 40 for name in names))
        return names

    def gaps_s(self, names: list[str], since_s: float) -> list[float]:
        """Seconds between tokens of each stream after a moment."""
        found = []
        for name in names:
            at = [one for one in self.tokens_s[name] if one >= since_s]
            found += [after - before for before, after in pairwise(at)]
        return sorted(found)

    def first_s(self, name: str) -> float:
        return self.tokens_s[name][0]


def timeline(lab, **settings) -> Timeline:
    options = {"blocks": 4000, "max_sequences": 64, "context_tokens": 8192} | COSTS | settings
    return Timeline(lab.engine(**options))


@pytest.fixture(scope="module")
def long_lab(simulated_lab, tmp_path_factory):
    """The simulated lab with a model that takes long prompts."""
    path = tmp_path_factory.mktemp("long")
    config = json.loads((simulated_lab.folder.path / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return type(simulated_lab)(ModelFolder("long", path), simulated_lab.model)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_long_prompt_neither_stops_running_streams_nor_short_prompts_that_come_later(long_lab, preset) -> None:
    """Gaps are the preset's multiple of what all that are here take without prompts, and ten short prompts pass."""
    line = timeline(long_lab, preset=preset)
    names = line.streaming(long_lab)
    calm_s = max(line.gaps_s(names, line.tokens_s[names[-1]][-20]))
    began_s = line.now_s
    line.engine.submit(long_lab.plan("long", [3 + at % 90 for at in range(LONG_TOKENS)], max_tokens=1))
    line.step()
    for n in range(SHORTS):
        line.engine.submit(long_lab.plan(f"short-{n}", [9 + n] * 24, max_tokens=1))
    line.until(lambda: "long" in line.tokens_s)
    all_s = calm_s + (1 + SHORTS) * COSTS["simulated_row_us"] / 1e6  # a step in which all that are here decode
    assert line.gaps_s(names, began_s)[-1] < 1.1 * PRESETS[preset].stretch * all_s
    assert len(line.gaps_s(names, began_s)) > STREAMS * 10, "nothing was disturbed"
    assert max(line.first_s(f"short-{n}") for n in range(SHORTS)) < line.first_s("long")
    shorts_s = max(line.first_s(f"short-{n}") for n in range(SHORTS)) - began_s
    assert shorts_s < 0.2 * (line.first_s("long") - began_s), "short prompts waited for most of the long one"


@pytest.mark.parametrize(("preset", "dearest"), [("latency", 2.4), ("mixed", 1.7), ("throughput", 1.5)])
def test_a_long_prompt_beside_sixteen_streams_takes_at_most_so_many_times_what_it_takes_alone(
    long_lab, preset, dearest
) -> None:
    alone, beside = timeline(long_lab, preset=preset), timeline(long_lab, preset=preset)
    beside.streaming(long_lab, 16)
    took = {}
    for line in (alone, beside):
        for name in ("known", "long"):  # what prompts cost is learnt from the first
            began_s = line.now_s
            line.engine.submit(
                long_lab.plan(name, [3 + at % 90 for at in range(LONG_TOKENS)], max_tokens=1, cache_salt=name.encode())
            )
            line.until(lambda line=line, name=name: name in line.tokens_s)
            took[line is alone] = line.now_s - began_s
    assert took[False] < dearest * took[True]


def test_a_target_of_ones_own_bounds_every_gap(long_lab) -> None:
    line = timeline(long_lab, itl_target_ms=80)
    names = line.streaming(long_lab)
    began_s = line.now_s
    line.engine.submit(long_lab.plan("long", [3 + at % 90 for at in range(LONG_TOKENS)], max_tokens=1))
    line.until(lambda: "long" in line.tokens_s)
    assert 0.07 < line.gaps_s(names, began_s)[-1] < 0.09


def test_with_a_real_model_too_streams_get_a_token_in_every_step_and_short_prompts_pass(torch_lab) -> None:
    """No times: what a step holds."""
    engine = torch_lab.engine(blocks=400, prefill_chunk=16, max_sequences=64)
    for n in range(STREAMS):
        engine.submit(torch_lab.plan(f"stream-{n}", [5 + n] * 6, max_tokens=200))
    answers = torch_lab.answers()
    while torch_lab.step(engine, answers).load.prefilling_sequences:
        pass
    engine.submit(torch_lab.plan("long", [3 + at % 90 for at in range(240)], max_tokens=1))
    torch_lab.step(engine, answers)
    for n in range(SHORTS):
        engine.submit(torch_lab.plan(f"short-{n}", [40 + n] * 5, max_tokens=1))
    order: list[str] = []
    while "long" not in order:
        tokens = [e.request_id for e in torch_lab.step(engine, answers).events if isinstance(e, TokensEvent)]
        assert sum(name.startswith("stream") for name in tokens) == STREAMS
        order += [name for name in tokens if not name.startswith("stream")]
    assert order[-1] == "long"
    assert len(order) == SHORTS + 1
