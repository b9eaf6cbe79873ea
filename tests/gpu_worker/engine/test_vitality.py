"""(B22) An engine that computes nothing any more says so; one that is only given bad requests goes on."""

import socket
import threading

import pytest
import torch

from gpu_worker.engine import process
from gpu_worker.engine.api import FinishedEvent, Reason
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.frames import FramePort
from gpu_worker.engine.messages import Fatal, Ready, Submit, decode_report, encode
from gpu_worker.engine.vitality import BARREN_STEPS, EngineBroken

BAD_TOKEN = 90


class Dying:
    """A decoder that fails on BAD_TOKEN and, after `lives` forward passes, on everything: by raising or with NaN."""

    def __init__(self, decoder, lives: float, how: str = "raise") -> None:
        self._decoder, self._lives, self._how = decoder, lives, how
        self.kv_shape = decoder.kv_shape

    def forward(self, batch, kv):
        self._lives -= 1
        logits = self._decoder.forward(batch, kv)
        if self._lives < 0 and self._how == "nan":
            return torch.full_like(logits, torch.nan)
        if self._lives < 0 or (batch.token_ids == BAD_TOKEN).any():
            raise RuntimeError("a kernel failed")
        return logits


@pytest.fixture(scope="module")
def lab(plain_lab):
    return plain_lab


@pytest.fixture
def engine(lab):
    """`engine(lives, how)`: an engine whose device is lost after so many forward passes."""

    def make(lives: float, how: str = "raise"):
        engine = lab.engine()
        engine._runner._decoder = Dying(engine._runner._decoder, lives, how)
        return engine

    return make


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_an_engine_whose_device_is_lost_says_so_after_a_few_steps_that_came_to_nothing(lab, engine, how):
    broken = engine(0, how)
    for step in range(BARREN_STEPS):
        broken.submit(lab.plan(f"r{step}"))
        if step < BARREN_STEPS - 1:
            broken.step()
    with pytest.raises(EngineBroken):
        broken.step()


def test_a_stream_of_bad_requests_does_not_end_a_healthy_engine(lab, engine, answers):
    well = engine(1e9)
    for number in range(5 * BARREN_STEPS):
        well.submit(lab.plan(f"bad{number}", [BAD_TOKEN] * 3))
        lab.step(well, answers)
    assert {end.reason for end in answers.ends.values()} == {Reason.ERROR}
    assert len(lab.answer(well, lab.plan("good"))) == 8


def test_a_step_that_succeeds_starts_the_count_anew(lab, engine, answers):
    broken = engine(0)
    for number in range(3 * BARREN_STEPS):
        broken._runner._decoder._lives = number % BARREN_STEPS == 0
        broken.submit(lab.plan(f"r{number}", max_tokens=1))
        lab.step(broken, answers)
    reasons = [end.reason for end in answers.ends.values()]
    assert reasons == [Reason.LENGTH, Reason.ERROR, Reason.ERROR] * 3


def test_the_engines_process_ends_with_the_reason(lab, engine, monkeypatch):
    broken = engine(6)  # enough to be proven after loading
    monkeypatch.setattr(process, "build_engine", lambda config, progress: broken)
    end, theirs = socket.socketpair()
    ours = FramePort(end)
    thread = threading.Thread(target=process._run, args=(process._Port(theirs), EngineConfig(model="tiny")))
    thread.start()
    reports = []
    while not (reports and isinstance(reports[-1], Fatal)):
        assert ours.pending(30), "the engine says nothing"
        reports.append(decode_report(ours.receive()))
        failed = [event for event in events_of(reports[-1]) if isinstance(event, FinishedEvent)]
        if isinstance(reports[-1], Ready) or failed:
            ours.send(encode(Submit(lab.plan(f"r{len(reports)}"))))
    thread.join()
    ours.close()
    theirs.close()
    assert "warm-up prompt" in reports[-1].message


def events_of(report):
    return report.result.events if hasattr(report, "result") else []
