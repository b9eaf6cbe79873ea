"""`python -m gpu_worker`: settings, telemetry, and one worker until SIGTERM.

Exit codes: 0 after a drain; 1 when the engine could not load, ended or hung, so that whoever watches the process starts
a fresh one; 2 for settings that cannot be used.
"""

import importlib.metadata
import logging
import os
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
    # OpenMP reads it once, when the engine process loads torch; the user's own variable wins.
    os.environ.setdefault("OMP_WAIT_POLICY", settings.omp_wait)
    worker_id, version = settings.identity(), importlib.metadata.version("shoal")
    telemetry = Telemetry(settings, worker_id, version)
    for warning in unknown_variables(WorkerSettings):
        log.warning(warning)
    try:
        return _served(Worker(settings, telemetry, worker_id, version))
    finally:
        telemetry.stop()


def _served(worker: Worker) -> int:
    code = 0
    try:
        run(worker.serve)
    except* EngineLost as lost:
        log.error("the engine is lost: %s", _first(lost), extra={"fields": {"event": "engine_lost"}})
        code = 1
    except* SettingsError as unusable:
        log.error("%s", _first(unusable))
        code = 2
    return code


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """The first error that is no group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
