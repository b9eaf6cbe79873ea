"""Settings: frozen, built once in a service's `__main__`, every field documented, unknown variables reported.

A field `drain_s` of the worker is read from `SHOAL_WORKER_DRAIN_S`; fields that all services share (those of the two
classes here) may be set for all at once as `SHOAL_DRAIN_S`. The service's own variable wins.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import unquote

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from mesh.models import DEFAULT_MODEL

SHARED_PREFIX = "SHOAL_"
SERVICES = ("GATEWAY", "SCHEDULER", "WORKER", "CACHE")
# A target that is a file of targets.
FILE_SCHEME = "file://"
# Exit code of a process whose settings cannot be used.
UNUSABLE_SETTINGS = 2
# What pydantic says of a size that it cannot read shows no size that it could.
EXAMPLES = {"byte_size": "; write e.g. 512MiB", "byte_size_unit": "; write e.g. 512MiB"}
# Read outside the services: mesh/models.py and the CLI.
TOOL_VARIABLES = frozenset({"SHOAL_HOME", "SHOAL_API_KEY"})


class SettingsError(Exception):
    """A value that cannot be used. The message names each variable and says what is wrong with it."""


class ServiceSettings(BaseSettings):
    """What every service has. Subclasses set `service` and add their own fields."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")
    service: ClassVar[str] = ""

    host: str = Field("127.0.0.1", description="Address to listen on. Loopback unless you say otherwise.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of Prometheus /metrics. 0 = any free port.")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="Least severe level logged.")
    log_format: str = Field("json", pattern="^(json|text)$", description="json = one object a line with trace ids.")
    otlp_endpoint: str = Field(
        "", description="OTLP/gRPC collector, e.g. http://localhost:4317. Empty = no tracing, at no cost."
    )
    tls_dir: str = Field(
        "",
        description="Folder with ca.pem and this service's NAME.pem and NAME.key: mutual TLS on every gRPC link, TLS at"
        " the gateway's doors. Set it for all services alike. Empty = no TLS, at no cost.",
    )
    trace_ratio: float = Field(1.0, ge=0, le=1, description="Share of new traces that are recorded.")
    drain_s: float = Field(
        25.0,
        ge=0,
        description="After SIGTERM: seconds that running work may take to end. Keep it under the kill timer.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        own = EnvSettingsSource(settings_cls, env_prefix=f"{SHARED_PREFIX}{cls.service}_")
        return init_settings, own, _SharedSource(settings_cls, env_prefix=SHARED_PREFIX)

    @classmethod
    def load(cls, **given: object) -> Self:
        """From the environment. Raises SettingsError that lists every bad variable at once."""
        try:
            return cls(**given)  # type: ignore[arg-type]
        except ValidationError as error:
            lines = [
                f"{cls.variable('_'.join(map(str, e['loc'])))}: {e['msg']} (got {e['input']!r})"
                + EXAMPLES.get(e["type"], "")
                for e in error.errors()
            ]
            raise SettingsError("\n".join(lines)) from None

    @classmethod
    def variable(cls, name: str) -> str:
        """The variable that sets a field: the service's own, unless only the shared one is there."""
        own, shared = f"{SHARED_PREFIX}{cls.service}_{name.upper()}", f"{SHARED_PREFIX}{name.upper()}"
        return shared if name in SHARED_FIELDS and shared in os.environ and own not in os.environ else own


class ModelSettings(ServiceSettings):
    """What the services on a token's path, gateway and worker, have: a model folder, and schedulers to ask."""

    model: str = Field(DEFAULT_MODEL, description="Name of a pulled model, or the path of a model folder.")
    schedulers: str = Field(
        "127.0.0.1:50061",
        description="host:port of the schedulers, comma-separated. A name with several addresses means them all;"
        " file:///path means a file of them, which is read again when it changes.",
    )

    @field_validator("schedulers")
    @classmethod
    def _are_targets(cls, schedulers: str) -> str:
        split_targets(schedulers)
        return schedulers


def split_targets(targets: str) -> list[tuple[str, int]]:
    """host:port pairs of a comma-separated setting; its files are `target_files`. Raises ValueError."""
    pairs = []
    for target in _parts(targets):
        if target.startswith(FILE_SCHEME):
            _path_of(target)
            continue
        host, _, port = target.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{target!r} is not host:port")
        pairs.append((host.strip("[]"), int(port)))
    return pairs


def target_files(targets: str) -> list[Path]:
    """The files of a comma-separated setting of targets; mesh/discovery.py reads them."""
    return [_path_of(target) for target in _parts(targets) if target.startswith(FILE_SCHEME)]


def _parts(targets: str) -> list[str]:
    return list(filter(None, (part.strip() for part in targets.split(","))))


def _path_of(target: str) -> Path:
    path = unquote(target.removeprefix(FILE_SCHEME))
    if not path.startswith("/"):
        raise ValueError(f"{target!r} is not host:port, nor file:///path of a file of them")
    return Path(path)


SHARED_FIELDS = frozenset(ModelSettings.model_fields)


class _SharedSource(EnvSettingsSource):
    """Reads `SHOAL_<FIELD>` for shared fields only, so that one service's port is never another's."""

    def __call__(self) -> dict[str, object]:
        return {name: value for name, value in super().__call__().items() if name in SHARED_FIELDS}


def variables(settings: type[ServiceSettings]) -> dict[str, str]:
    """Every variable a service reads, with its description."""
    return {
        f"{SHARED_PREFIX}{settings.service}_{name.upper()}": field.description or ""
        for name, field in settings.model_fields.items()
    }


def unknown_variables(settings: type[ServiceSettings], environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A sentence for each SHOAL_ variable that nothing reads: a typing error is said, not ignored."""
    shared = {f"{SHARED_PREFIX}{name.upper()}" for name in SHARED_FIELDS} | TOOL_VARIABLES
    own = set(variables(settings))
    others = tuple(f"{SHARED_PREFIX}{name}_" for name in SERVICES if name != settings.service)
    for variable in sorted(environ):
        if not variable.startswith(SHARED_PREFIX) or variable in own | shared or variable.startswith(others):
            continue
        near = difflib.get_close_matches(variable, own | shared, n=1)
        yield f"{variable} is set but nothing reads it" + (f"; did you mean {near[0]}?" if near else "")
