"""`shoal bench load` against a whole mesh, over HTTP and over gRPC."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_load_is_measured_at_either_door(mesh, door, tmp_path):
    url = mesh.url if door == "http" else f"grpc://{mesh.state.grpc_address}"
    file = tmp_path / "load.json"
    shape = ["--input-tokens", "20", "--output-tokens", "6", "--requests", "4", "--streams", "2", "--warmup", "1"]
    command = [sys.executable, "-m", "mesh.cli.main", "bench", "load", url, *shape, "--json", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=mesh.env)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(file.read_text())
    found = {row["metric"]: row["value"] for row in report["rows"]}
    assert (found["whole answers"], found["errors"], found["answer, median"]) == (4, 0, 6)
    assert found["prompt, median as the server counts"] >= 20
    assert report["ran_on"]["engine"] == "real"
    assert report["ran_on"]["model"] == mesh.plan.model
