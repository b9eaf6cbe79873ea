"""The checked-in stubs are exactly what the protos give with the pinned generators."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def stubs_under(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*_pb2*") if path.suffix in (".py", ".pyi")]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_regenerating_the_stubs_changes_nothing(tmp_path):
    # protoc looks for the mypy plugin on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "protos.py", tmp_path],
        env=os.environ | {"PATH": path},
        check=True,
        timeout=90,
    )
    made, kept = stubs_under(tmp_path), stubs_under(ROOT / "protos")
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []
    assert "shoal/gateway/v1/gateway_pb2_grpc.pyi" in made
