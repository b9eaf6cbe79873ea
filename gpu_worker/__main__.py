"""`python -m gpu_worker`: settings, telemetry, and one worker until SIGTERM.

Exit codes: 0 after a drain; 1 when the engine could not load, ended or hung, so that whoever watches the process starts
a fresh one; 2 for settings that cannot be used.
"""

import importlib.metadata
import logging
import sys

from gpu_worker.settings import WorkerSettings
from gpu_worker.worker import EngineLost, Worker
from mesh.discovery import split_targets
from mesh.server import run
from mesh.settings import SettingsError, unknown_variables
from mesh.telemetry import Telemetry

log = logging.getLogger("shoal.worker")


def main() -> int:
    """The process's exit code."""
    try:
        settings = WorkerSettings.load()
        split_targets(settings.schedulers)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    worker_id, version = settings.identity(), importlib.metadata.version("shoal")
    telemetry = Telemetry(settings, worker_id, version)
    for warning in unknown_variables(WorkerSettings):
        log.warning(warning)
    try:
        run(Worker(settings, telemetry, worker_id, version).serve)
    except EngineLost as error:
        log.error("the engine is lost: %s", error, extra={"fields": {"event": "engine_lost"}})
        return 1
    finally:
        telemetry.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
