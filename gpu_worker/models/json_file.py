"""JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from gpu_worker.models.errors import LoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises LoadError if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise LoadError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(path, "should hold a JSON object")
    return value
