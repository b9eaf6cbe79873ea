"""`python -m gpu_worker.measure TASK`: one measurement in the settings of a worker (SHOAL_WORKER_*, SHOAL_MODEL).

Reads one JSON object from stdin, the task's request, and writes JSON lines to stdout: {"done", "total", "what"} as it
goes on, and {"result": …} or {"error": why not} at the end. `mesh/bench/measurer.py` is the other end.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from gpu_worker.engine.config import EngineConfig
from gpu_worker.models.errors import LoadError
from gpu_worker.settings import WorkerSettings
from mesh.errors import ShoalError
from mesh.models import find
from mesh.settings import SettingsError

Say = Callable[[int, int, str], None]  # done, total, what
Task = Callable[[EngineConfig, dict[str, Any], Say], dict[str, Any]]

CANNOT = 2


def perplexity(config: EngineConfig, request: dict[str, Any], say: Say) -> dict[str, Any]:
    """{"windows": [[id]]} → {"nll": [sum over each window's predicted tokens]}"""
    from gpu_worker.measure.perplexity import negative_log_likelihoods

    windows: list[list[int]] = request["windows"]
    sums = []
    for nll in negative_log_likelihoods(config, windows):
        sums.append(nll)
        say(len(sums), len(windows), "reading")
    return {"nll": sums}


def steps(config: EngineConfig, request: dict[str, Any], say: Say) -> dict[str, Any]:
    """{"shapes": [[batch, context]], "steps": n} → {"step_ms": [median or null], "floor": what bounds them}"""
    from gpu_worker.measure import limits
    from gpu_worker.measure.steps import Steps

    shapes: list[tuple[int, int]] = [(batch, context) for batch, context in request["shapes"]]
    say(0, len(shapes), "measuring the machine")
    machine = {"read_gb_per_s": limits.read_gb_per_s(), "int8_gop_per_s": limits.int8_gop_per_s()}
    measured = Steps(config, request["steps"])
    found = []
    for number, (batch, context) in enumerate(shapes):
        say(number, len(shapes), f"{batch} sequences of {context} tokens")
        found.append(measured.median_ms(batch, context))
    return {"step_ms": found, "floor": machine | measured.work()}


def start(config: EngineConfig, request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Load and answer one token; whoever started the process knows how long it took."""
    from gpu_worker.engine.api import TokensEvent
    from gpu_worker.engine.build import build_engine
    from gpu_worker.engine.vitality import warm_up_plan

    engine = build_engine(config, lambda fraction, what: say(round(100 * fraction), 100, what))
    engine.submit(warm_up_plan(engine.info, 1))
    while engine.has_work():
        for event in engine.step().events:
            if isinstance(event, TokensEvent):
                return {"token": event.ids[0], "precision": engine.info.precision}
    raise LoadError(find(config.model).path, "the model gave no token")


TASKS: dict[str, Task] = {"perplexity": perplexity, "steps": steps, "start": start}


def settings() -> dict[str, Any]:
    """Every setting of a worker with the value that it would have here."""
    return WorkerSettings.load().model_dump(mode="json")


def serve(task: str, request: dict[str, Any], out: TextIO) -> int:
    """Run one task; the exit code."""

    def say(done: int, total: int, what: str) -> None:
        print(json.dumps({"done": done, "total": total, "what": what}), file=out)

    try:
        result = settings() if task == "settings" else TASKS[task](WorkerSettings.load().engine(), request, say)
    except (SettingsError, LoadError, ShoalError) as error:
        print(json.dumps({"error": str(error)}), file=out)
        return CANNOT
    print(json.dumps({"result": result}), file=out)
    return 0


def main() -> int:
    """Libraries may print; what is said here keeps a descriptor of its own."""
    if len(sys.argv) != 2 or sys.argv[1] not in {"settings", *TASKS}:
        print(f"usage: python -m gpu_worker.measure settings|{'|'.join(TASKS)} < request.json", file=sys.stderr)
        return CANNOT
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        return serve(sys.argv[1], json.load(sys.stdin), out)


if __name__ == "__main__":
    sys.exit(main())
