"""Generate the stubs beside their protos: `python tools/protos.py [OUT]`, default OUT is protos/.

Pinned to the grpcio-tools and mypy-protobuf of pyproject.toml; tests/protos regenerates and fails on any difference.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"


def generate(out: Path) -> list[Path]:
    """Write the stubs of every proto under `out`; returns the files written, relative to it."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if code:
        raise SystemExit(f"protoc failed with {code}")
    return sorted(path.relative_to(out) for path in out.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi"))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PROTOS
    for written in generate(target):
        print(written)
