"""Write docs/settings.md from the settings classes: `python tools/settings.py`. A test holds the file to them."""

from pathlib import Path

from pydantic_core import PydanticUndefined

from cache_service.settings import CacheSettings
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from mesh.settings import SHARED_FIELDS, ModelSettings, ServiceSettings
from scheduler.settings import SchedulerSettings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """\
# Settings

Made by `tools/settings.py` from the settings classes; do not edit.

Every service reads environment variables once, at its start. A shared setting is read from `SHOAL_<NAME>` by all
services and from `SHOAL_<SERVICE>_<NAME>` by one, which wins. A value that cannot be used ends the process with the
variable's name; a variable that nothing reads is logged with the nearest known name. `SHOAL_HOME` moves pulled models
and the state of `shoal up` (default: `shoal` in the user's cache folder).
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, _section("Shared by all services", "SHOAL_", ModelSettings, set(SHARED_FIELDS))]
    for settings in (GatewaySettings, SchedulerSettings, WorkerSettings, CacheSettings):
        own = set(settings.model_fields) - SHARED_FIELDS
        parts.append(_section(settings.service.lower(), f"SHOAL_{settings.service}_", settings, own))
    return "\n".join(parts)


def _section(title: str, prefix: str, settings: type[ServiceSettings], names: set[str]) -> str:
    rows = [f"## {title}\n", "| variable | default | meaning |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        if name in names:
            default = "" if field.default in ("", PydanticUndefined) else f"`{field.default}`"
            meaning = (field.description or "").replace("|", "\\|")
            rows.append(f"| `{prefix}{name.upper()}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
