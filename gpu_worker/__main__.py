"""`python -m gpu_worker`: one worker until SIGTERM. Exit codes: mesh/process.py (1: engine lost, 2: model unusable)."""

import asyncio
import os
import sys

from gpu_worker.settings import WorkerSettings
from gpu_worker.worker import Worker
from mesh.process import VERSION, run_service
from mesh.telemetry import Telemetry


async def serve(settings: WorkerSettings, telemetry: Telemetry, stopping: asyncio.Event) -> None:
    """Load the model and serve until `stopping`, then drain. Raises EngineLost."""
    # OpenMP reads it once, when the engine process loads torch; the user's own variable wins.
    os.environ.setdefault("OMP_WAIT_POLICY", settings.omp_wait)
    await Worker(settings, telemetry, telemetry.instance, VERSION).serve(stopping)


def main() -> int:
    """The process's exit code."""
    return run_service(WorkerSettings, WorkerSettings.identity, serve)


if __name__ == "__main__":
    sys.exit(main())
