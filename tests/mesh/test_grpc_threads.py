"""A process reads its gRPC sockets in the thread that waits for events, not in a pool of them."""

import subprocess
import sys

import pytest

# Fails the import of grpc's core where the variable that it reads then is not set yet.
PROGRAM = """
import importlib, os, sys

class Order:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            assert "-event_engine_client" in os.environ.get("GRPC_EXPERIMENTS", ""), "grpc came first"
            print("seen")

sys.meta_path.insert(0, Order())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("service", ["gateway", "scheduler", "gpu_worker"])
def test_a_service_chooses_grpcs_threads_before_grpc_is_imported(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{service}.__main__"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "seen\n"
