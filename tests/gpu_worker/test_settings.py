"""The worker's settings and how they reach its engine."""

from enum import StrEnum
from typing import get_args

import pytest

from gpu_worker.engine.config import EngineConfig
from gpu_worker.settings import WorkerSettings
from mesh.cli.up import EngineKind, PolicyName, PresetName
from mesh.settings import SettingsError, unknown_variables, variables


def test_every_setting_of_the_engine_is_a_documented_variable() -> None:
    known = variables(WorkerSettings)
    for name in EngineConfig.__struct_fields__:
        assert known[f"SHOAL_WORKER_{name.upper()}"] or name == "model"
    assert all(known.values())


def test_the_engine_is_told_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_WORKER_KV_BYTES", "512MiB")
    monkeypatch.setenv("SHOAL_WORKER_PREFILL_CHUNK", "64")
    monkeypatch.setenv("SHOAL_MODEL", "./somewhere")
    config = WorkerSettings.load().engine()
    assert (config.kv_bytes, config.prefill_chunk, config.model) == (512 * 1024 * 1024, 64, "./somewhere")


def test_defaults_are_the_engines_own_but_for_the_device() -> None:
    default, own = WorkerSettings.load(model="m").engine(), EngineConfig(model="m", device="auto")
    assert default == own


@pytest.mark.parametrize(
    ("name", "value"), [("DEVICE", "tpu"), ("PRECISION", "int1"), ("MAX_SEQUENCES", "-1"), ("KV_BYTES", "lots")]
)
def test_a_value_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SHOAL_WORKER_{name}", value)
    with pytest.raises(SettingsError, match=f"SHOAL_WORKER_{name}"):
        WorkerSettings.load()


@pytest.mark.parametrize("value", ["lots", "5 potatoes"])
def test_a_size_that_cannot_be_read_is_answered_with_one_that_can(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SHOAL_WORKER_KV_BYTES", value)
    with pytest.raises(SettingsError, match=r"e\.g\. 512MiB"):
        WorkerSettings.load()


def test_a_mistyped_variable_is_reported_with_the_right_one() -> None:
    [said] = unknown_variables(WorkerSettings, {"SHOAL_WORKER_PREFIL_CHUNK": "1"})
    assert "SHOAL_WORKER_PREFILL_CHUNK" in said


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({"host": "127.0.0.1"}, "127.0.0.1:7"),
        ({"host": "0.0.0.0", "advertise_host": "worker-3"}, "worker-3:7"),
        ({"host": "::1"}, "[::1]:7"),
    ],
)
def test_peers_are_told_an_address_that_they_can_call(given: dict[str, str], address: str) -> None:
    assert WorkerSettings.load(**given).advertised(7) == address


def test_a_worker_that_listens_everywhere_is_reached_by_its_machines_name() -> None:
    host, _, port = WorkerSettings.load(host="0.0.0.0").advertised(7).rpartition(":")
    assert port == "7"
    assert host not in ("", "0.0.0.0")


def test_each_process_start_has_an_identity_of_its_own() -> None:
    settings = WorkerSettings.load()
    assert settings.identity() != settings.identity()
    assert WorkerSettings.load(worker_id="w-1").identity() == "w-1"


@pytest.mark.parametrize(("offered", "name"), [(EngineKind, "kind"), (PresetName, "preset"), (PolicyName, "policy")])
def test_shoal_up_offers_what_a_worker_knows(offered: type[StrEnum], name: str) -> None:
    assert {one.value for one in offered} == set(get_args(WorkerSettings.model_fields[name].annotation))


@pytest.mark.parametrize("value", ["-1", "nan", "1e9"])
def test_a_timing_model_of_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SHOAL_WORKER_SIMULATED_STEP_MS", value)
    with pytest.raises(SettingsError, match="SHOAL_WORKER_SIMULATED_STEP_MS"):
        WorkerSettings.load()


def test_messages_keep_the_presets_distance_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MODEL", "m")
    monkeypatch.setenv("SHOAL_WORKER_PRESET", "throughput")
    assert WorkerSettings().stream_interval_s() == 0.05
    monkeypatch.setenv("SHOAL_WORKER_STREAM_INTERVAL_MS", "0")
    assert WorkerSettings().stream_interval_s() == 0.0
