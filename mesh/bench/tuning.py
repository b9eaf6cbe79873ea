"""How the workers of a benchmark's meshes are set, and what a worker makes of it: asked of the worker's own code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.bench import measurer
from mesh.bench.report import CannotMeasure

PREFIX = "SHOAL_WORKER_"
# What of a worker's settings a report tells, where it has a value.
TOLD = ("preset", "policy", "kv_precision", "context_tokens", "max_sequences", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is asked of the worker; None = its default, or what this process's environment says."""

    precision: str | None = None
    preset: str | None = None

    def env(self, **more: object) -> dict[str, str]:
        """The variables, further settings by their names among them: env(policy="static")."""
        wanted = {"precision": self.precision, "preset": self.preset} | more
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in wanted.items() if value is not None}


def effective(model: str, env: Mapping[str, str]) -> dict[str, Any]:
    """A worker's settings under these variables. Raises CannotMeasure for one that it does not know or take.

    Services ignore unknown variables; a benchmark must not measure something else than it says.
    """
    settings = measurer.run("settings", {"SHOAL_MODEL": model, **env})
    for variable in env:
        if variable.startswith(PREFIX) and variable.removeprefix(PREFIX).lower() not in settings:
            raise CannotMeasure(f"this worker has no setting {variable}")
    return settings


def facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a worker's settings those that a report tells; 0 means the preset's own."""
    return {name: settings[name] for name in TOLD if settings.get(name)}
