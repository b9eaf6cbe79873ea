"""What the worker knows of the engine's device between two of its reports."""

from gpu_worker.cold.device import Device
from gpu_worker.engine.api import EngineLoad, StepResult


def step(*, free: int, cached: int, stored: list[bytes], evicted: list[bytes]) -> StepResult:
    load = EngineLoad(
        steps=1,
        waiting_sequences=0,
        running_sequences=1,
        queued_prefill_tokens=0,
        prefilling_sequences=0,
        free_blocks=free,
        cached_blocks=cached,
        used_blocks=1,
        committed_blocks=1,
        total_blocks=free + cached + 1,
        prefill_tokens_per_s=500.0,
        decode_tokens_per_s=0.0,
        median_step_ms=1.0,
        preemptions=0,
        running=[],
    )
    return StepResult(events=[], load=load, duration_ms=1.0, blocks_stored=stored, blocks_evicted=evicted)


def test_before_the_first_report_nothing_is_there_and_nothing_has_room() -> None:
    device = Device()
    assert device.leading([b"a"]) == 0
    assert device.room == 0
    assert device.prefill_tokens_per_s == 0


def test_a_step_changes_what_is_held_and_a_snapshot_replaces_it() -> None:
    device = Device()
    device.holds([b"a", b"b"])
    device.stepped(step(free=3, cached=2, stored=[b"c"], evicted=[b"b"]))
    assert [key in device for key in (b"a", b"b", b"c")] == [True, False, True]
    assert device.room == 5
    assert device.prefill_tokens_per_s == 500
    device.holds([b"d"])
    assert b"a" not in device
    assert b"d" in device


def test_only_the_leading_run_counts_and_other_keys_may_fill_its_gaps() -> None:
    device = Device()
    device.holds([b"a", b"c"])
    assert device.leading([b"a", b"b", b"c"]) == 1
    assert device.leading([b"a", b"b", b"c"], {b"b"}) == 3
