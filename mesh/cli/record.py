"""The supervisor's own record: a line for each start, readiness, end and stop of a process, with its pid."""

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(message)s"


def record(log: Path | None = None) -> None:
    """Write the record to `log`, begun anew; without it to stderr."""
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.StreamHandler() if log is None else logging.FileHandler(log, mode="w")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("shoal.supervisor")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
