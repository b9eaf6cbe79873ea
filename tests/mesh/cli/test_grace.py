"""The kill timer is later than the end of a drain, whichever variable sets the drain."""

import pytest

from mesh.cli.grace import MARGIN_S, grace_s, stop_s


@pytest.mark.parametrize(
    ("role", "environ", "drain_s"),
    [
        ("worker", {}, 25),
        ("worker", {"SHOAL_DRAIN_S": "40"}, 40),
        ("worker", {"SHOAL_DRAIN_S": "40", "SHOAL_WORKER_DRAIN_S": "60"}, 60),
        ("worker", {"SHOAL_GATEWAY_DRAIN_S": "60"}, 25),
        ("worker", {"SHOAL_WORKER_DRAIN_S": "long"}, 25),
        ("worker", {"SHOAL_WORKER_DRAIN_S": "-1"}, 25),
        ("scheduler", {"SHOAL_SCHEDULER_DRAIN_S": "1"}, 1),
        ("gateway", {"SHOAL_GATEWAY_DRAIN_S": "50", "SHOAL_GATEWAY_CUT_S": "7"}, 57),
        ("gateway", {"SHOAL_DRAIN_S": "50"}, 52),
        ("valkey", {"SHOAL_DRAIN_S": "50"}, 0),
    ],
)
def test_a_processs_grace_is_its_own_drain_time_and_a_margin(
    role: str, environ: dict[str, str], drain_s: float
) -> None:
    assert grace_s(role, environ) == drain_s + MARGIN_S


def test_stopping_a_mesh_takes_one_role_after_the_other() -> None:
    environ = {"SHOAL_WORKER_DRAIN_S": "60"}
    roles = ("gateway", "worker", "scheduler", "valkey")
    assert stop_s([*roles, "worker", "worker"], environ) == sum(grace_s(role, environ) for role in roles) > 60


def test_the_defaults_are_the_services_own() -> None:
    from gateway.settings import GatewaySettings

    fields = GatewaySettings.model_fields
    assert grace_s("gateway", {}) == fields["drain_s"].default + fields["cut_s"].default + MARGIN_S
