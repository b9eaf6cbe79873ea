"""The rules of who may import what. A service that reached into another would compile, run and rot."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("gateway", "scheduler", "gpu_worker", "cache_service")
SOURCES = sorted(
    path
    for folder in (*SERVICES, "mesh", "protos")
    for path in (ROOT / folder).rglob("*.py")
    if "_pb2" not in path.name
)
# The gateway's front doors: where a request enters, protobuf or HTTP in hand.
FRONT_DOORS = ("gateway/grpc/", "gateway/http/")
# translate.py: a service's protobuf, turned into plain dataclasses and back where service.py would grow too long.
EDGES = ("service.py", "translate.py", "__main__.py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, at whatever depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_levels(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imports(path)}


def test_there_are_sources_to_check() -> None:
    assert {name_of(path).split("/")[0] for path in SOURCES} >= {"gateway", "scheduler", "gpu_worker", "mesh", "protos"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_service_imports_another_and_mesh_imports_none(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    foreign = top_levels(path) & set(SERVICES) - {own}
    assert not foreign, f"{name_of(path)} imports {foreign}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_edges_touch_grpc_and_stubs(path: Path) -> None:
    name = name_of(path)
    edge = name.startswith(("mesh/", "protos/", *FRONT_DOORS)) or path.name in EDGES
    stubs = [module for module in imports(path) if "_pb2" in module or module.split(".")[0] == "grpc"]
    assert edge or not stubs, f"{name} imports {stubs}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_worker_imports_torch(path: Path) -> None:
    heavy = top_levels(path) & {"torch", "triton", "safetensors"}
    assert name_of(path).startswith("gpu_worker/") or not heavy, f"{name_of(path)} imports {heavy}"


@pytest.mark.parametrize("path", [p for p in SOURCES if name_of(p).startswith("protos/")], ids=name_of)
def test_the_contract_imports_nothing_of_ours(path: Path) -> None:
    assert not top_levels(path) & {"mesh", *SERVICES}


def test_one_file_of_the_worker_meets_both_asyncio_and_the_engine_process() -> None:
    engine = [path for path in SOURCES if name_of(path).startswith("gpu_worker/engine/")]
    assert engine
    assert [name_of(path) for path in engine if "asyncio" in top_levels(path)] == []
    spawning = [
        name_of(p) for p in SOURCES if name_of(p).startswith("gpu_worker/") and "multiprocessing" in top_levels(p)
    ]
    outside = [name for name in spawning if not name.startswith("gpu_worker/engine/")]
    assert outside == ["gpu_worker/bridge.py"]


def test_policies_take_the_time_and_never_look_at_a_clock() -> None:
    for name in ("queue", "placement", "registry", "leases"):
        path = ROOT / "scheduler" / f"{name}.py"
        if path.exists():
            assert not top_levels(path) & {"time", "asyncio", "datetime"}, name
