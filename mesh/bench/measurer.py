"""Runs `python -m gpu_worker.measure TASK` as a process of its own: what is measured in an engine, not through a mesh.

The request goes in as one JSON object, JSON lines come back: how far it is, at last the result or why there is none.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from mesh.bench.local_mesh import stop
from mesh.bench.progress import bar
from mesh.bench.report import CannotMeasure
from mesh.child import end_with_parent

MODULE = "gpu_worker.measure"
TIMEOUT_S = 3600.0
STOP_S = 5.0


def run(task: str, env: Mapping[str, str], request: Mapping[str, Any] | None = None, words: str = "") -> dict[str, Any]:
    """The task's result under these variables, a bar shown meanwhile if it has `words`. Raises CannotMeasure."""
    with ExitStack() as stack:
        process, errors = stack.enter_context(_process(task, env))
        shown = stack.enter_context(bar(words, None)) if words else None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request or {}))
            process.stdin.close()
        except BrokenPipeError:
            raise CannotMeasure(f"{task}: it ended at once: {_last_line(errors)}") from None
        for line in process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "result" in said:
                return dict(said["result"])
            if "error" in said:
                raise CannotMeasure(str(said["error"]))
            if shown is not None:
                shown.say(f"{words}: {said['what']}, {said['done']} of {said['total']}")
        raise CannotMeasure(f"{task}: it gave no result: {_last_line(errors)}")


@contextmanager
def _process(task: str, env: Mapping[str, str]) -> Iterator[tuple["subprocess.Popen[str]", IO[bytes]]]:
    """It and its stderr; ended after TIMEOUT_S, and when the block is left."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, task],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        watch = threading.Timer(TIMEOUT_S, process.kill)
        watch.start()
        try:
            yield process, errors
        finally:
            watch.cancel()
            stop(process, STOP_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it said nothing"
