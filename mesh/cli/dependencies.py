"""Whether the distributions that Shoal's own metadata asks for are there, whole, and the tested versions.

Their modules are looked up, not imported: loading them all takes tens of seconds.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from mesh.cli.machine import INSTALL, Finding

SERVICE_EXTRAS = ("mesh", "gateway", "scheduler", "worker", "cli")


def findings() -> Iterator[Finding]:
    """One finding for each distribution that is missing, damaged or not the tested version; one for all the others."""
    tested = tested_versions()
    modules = _module_by_distribution()
    fine = 0
    for name in required_distributions():
        finding = _dependency(name, modules.get(_canonical(name)), tested.get(_canonical(name)))
        if finding is None:
            fine += 1
        else:
            yield finding
    yield Finding("dependencies", "ok", f"{fine} installed{', at the tested versions' if tested else ''}")


def required_distributions() -> list[str]:
    """Names that Shoal's own metadata requires for running the services."""
    wanted = []
    for line in importlib.metadata.requires("shoal") or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if name and name[0] != "shoal" and (extra is None or extra[1] in SERVICE_EXTRAS):
            wanted.append(name[0])
    return sorted(set(wanted))


def tested_versions() -> dict[str, str]:
    """From constraints.txt of a checkout, by canonical name; empty for an installation without one."""
    path = Path(__file__).resolve().parents[2] / "constraints.txt"
    if not path.is_file():
        return {}
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", path.read_text(), flags=re.MULTILINE)
    return {_canonical(name): version for name, version in pins}


def _dependency(name: str, module: str | None, tested: str | None) -> Finding | None:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", INSTALL)
    if module is not None and importlib.util.find_spec(module) is None:
        return Finding(name, "fail", f"{version}, but its module {module} is gone", f"install {name} again")
    if tested is not None and version.partition("+")[0] != tested.partition("+")[0]:
        return Finding(name, "warn", version, f"tested with {tested}: pip install {name}=={tested}")
    return None


def _module_by_distribution() -> dict[str, str]:
    """One importable module of each distribution: its namesake if it has one. Enough to tell that it is there."""
    found: dict[str, set[str]] = {}
    for module, names in importlib.metadata.packages_distributions().items():
        for name in names:
            if module.isidentifier() and not module.startswith("_"):
                found.setdefault(_canonical(name), set()).add(module)
    return {
        name: namesake if (namesake := name.replace("-", "_")) in modules else min(modules)
        for name, modules in found.items()
    }


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
