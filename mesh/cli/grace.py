"""How long each process of the local mesh may take to stop, before it is killed. Pure.

Read from the variables that the services themselves read, by name: the CLI imports none of them. A value that cannot be
used counts as the default; the service it is meant for refuses to start and says so.
"""

import math
from collections.abc import Iterable, Mapping

from mesh.settings import ServiceSettings

DRAIN_S = float(ServiceSettings.model_fields["drain_s"].default)
# Spent after the drain time: SHOAL_GATEWAY_CUT_S and its default.
CUT = {"gateway": ("SHOAL_GATEWAY_CUT_S", 2.0)}
# On top of that: closing servers, ending the engine's process, the last spans' way to a collector that does not answer.
MARGIN_S = 8.0


def grace_s(role: str, environ: Mapping[str, str]) -> float:
    """Seconds from SIGTERM to SIGKILL for a process of `role` that is started with `environ`."""
    if role == "valkey":
        return MARGIN_S
    shared_s = _seconds(environ, "SHOAL_DRAIN_S", DRAIN_S)
    drain_s = _seconds(environ, f"SHOAL_{role.upper()}_DRAIN_S", shared_s)
    return drain_s + (_seconds(environ, *CUT[role]) if role in CUT else 0.0) + MARGIN_S


def stop_s(roles: Iterable[str], environ: Mapping[str, str]) -> float:
    """Most seconds that stopping takes: one role after the other, all processes of a role at once."""
    return sum(grace_s(role, environ) for role in set(roles))


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    try:
        value = float(environ[variable])
    except (KeyError, ValueError):
        return default
    return value if math.isfinite(value) and value >= 0 else default
