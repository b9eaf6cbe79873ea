"""Alerts and dashboard use metrics that exist; Prometheus asks every service where it tells them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# What Prometheus and its client library make, beside the metrics of docs/metrics.md.
GIVEN = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",), "info": ("",)}


def documented() -> set[str]:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return {name + suffix for name, kind in rows for suffix in SUFFIXES[kind]}


def alerts() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def panels() -> Iterator[tuple[str, str]]:
    for panel in json.loads((DEPLOY / "grafana" / "dashboards" / "shoal.json").read_bytes())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def metrics_of(expression: str) -> set[str]:
    """Names that are neither functions, nor labels, nor words of PromQL."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without)\s*\([^)]*\)", "", expression)
    words = set(re.findall(r"\b[a-z_][a-z0-9_]*\b(?!\s*\()", bare))
    return words - {"or", "and", "unless", "by", "without"}


@pytest.mark.parametrize(("title", "expression"), [*alerts(), *panels()])
def test_an_expression_uses_metrics_that_are_documented(title: str, expression: str) -> None:
    used = metrics_of(expression)
    assert used, title
    assert used <= documented() | GIVEN


def test_prometheus_asks_every_replica_of_every_service_at_the_metrics_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for job in config["scrape_configs"]:
        (lookup,) = job["dns_sd_configs"]
        assert lookup["names"] == [job["job_name"]]
        assert services[job["job_name"]]["environment"]["SHOAL_METRICS_PORT"] == lookup["port"]
    ours = {name for name, service in services.items() if "SHOAL_METRICS_PORT" in service.get("environment", {})}
    assert {job["job_name"] for job in config["scrape_configs"]} == ours
    assert len(ours) == 4
