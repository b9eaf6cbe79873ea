"""Write docs/metrics.md from the metrics that the services register: `python tools/metrics.py`. A test holds the file
to them."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from cache_service.metrics import Metrics as CacheMetrics
from gateway.limits import Limiter
from gateway.metrics import Metrics as GatewayMetrics
from gpu_worker.metrics import WorkerMetrics
from mesh.callers import OnlyFrom
from mesh.expiry import expiry_gauge
from scheduler.metrics import Metrics as SchedulerMetrics

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """\
# Metrics

Made by `tools/metrics.py` from what the services register; do not edit.

Prometheus text: the gateway's on its HTTP port (`/metrics`, while no API keys are asked for) and on its metrics port,
those of the other services on theirs (`SHOAL_<SERVICE>_METRICS_PORT`). A name's end tells the unit: `_seconds`,
`_total` for counts that only grow. `shoal_worker_info` tells a worker's model, architecture, precision, device, preset,
policy and whether it is simulated. Every process tells its own CPU time and memory too (`process_cpu_seconds_total`,
`process_resident_memory_bytes`; a worker's are without those of its engine, a process of its own).

| metric | kind | labels | meaning |
|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    registry = CollectorRegistry()
    for metrics in (GatewayMetrics, SchedulerMetrics, WorkerMetrics, CacheMetrics):
        metrics(registry)
    Limiter("", registry=registry)
    OnlyFrom((), registry)
    expiry_gauge(registry)
    rows = []
    for collector in dict.fromkeys(registry._names_to_collectors.values()):
        (family,) = collector.describe()
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    TARGET.write_text(render())
