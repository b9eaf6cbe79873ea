"""One engine in a comparison: a batch of prompts goes in at once, and out come tokens and first-token times."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh.bench import openvino_driver
from mesh.bench.answer import Ask
from mesh.bench.asleep import Asleep
from mesh.bench.generator import Generator
from mesh.bench.http_target import HttpTarget
from mesh.bench.peer_venv import PeerVenv
from mesh.bench.report import CannotMeasure
from mesh.bench.target import TargetOptions
from mesh.child import end_with_parent

OPENVINO = PeerVenv("openvino", "openvino-genai==2026.4.1.0")
LOAD_TIMEOUT_S = 300.0
STOP_S = 10.0
LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch gave: output tokens, seconds from its start to its end, and to each answer's first token.

    Of a server also the prompt tokens that it found in a cache, and this process's CPU seconds of asking and reading.
    """

    tokens: int
    wall_s: float
    first_s: list[float]
    cached_tokens: int = 0
    generator_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


class Contender(Protocol):
    """An engine that can be given batches. Raises CannotMeasure for an answer that is not whole.

    `caches`: a prompt asked again finds what it left behind.
    """

    name: str
    caches: bool

    async def run(self, prompts: Sequence[str], output_tokens: int, timeout_s: float) -> Batch: ...


class HttpContender:
    """A server that speaks OpenAI's completions API."""

    caches = True

    def __init__(self, name: str, url: str, model: str, asleep: Asleep | None = None) -> None:
        self.name = name
        self._url = url
        self._model = model
        self._asleep = asleep  # but for its own batches

    async def run(self, prompts: Sequence[str], output_tokens: int, timeout_s: float) -> Batch:
        with self._asleep.awake() if self._asleep is not None else nullcontext():
            return await self._run(prompts, output_tokens, timeout_s)

    async def _run(self, prompts: Sequence[str], output_tokens: int, timeout_s: float) -> Batch:
        options = TargetOptions(model=self._model, api="completions", timeout_s=timeout_s)
        asks = iter([Ask(prompt=text, output_tokens=output_tokens) for text in prompts])
        async with HttpTarget(self._url, options) as target:
            run = await Generator([target]).closed(asks, streams=len(prompts), requests=len(prompts), duration_s=None)
        for outcome in run.outcomes:
            if outcome.error:
                raise CannotMeasure(f"{self.name} did not answer whole: {outcome.error}: {outcome.detail}")
        first = [outcome.first - outcome.due for outcome in run.outcomes if outcome.first is not None]
        cached = sum(outcome.cached_tokens for outcome in run.outcomes)
        return Batch(run.tokens, run.wall_s, first, cached, run.cpu_s)


class OpenVinoContender:
    """OpenVINO GenAI's continuous batching, in a process of its own environment."""

    name = "OpenVINO GenAI"
    caches = False  # its driver says so

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def run(self, prompts: Sequence[str], output_tokens: int, timeout_s: float) -> Batch:
        assert self._process.stdin is not None
        request = json.dumps({"prompts": list(prompts), "output_tokens": output_tokens})
        self._process.stdin.write(f"{request}\n".encode())
        answer = await self.line(timeout_s)
        if answer["tokens"] != [output_tokens] * len(prompts) or None in answer["first_s"]:
            raise CannotMeasure(f"{self.name} gave {answer['tokens']} tokens where {output_tokens} each were asked for")
        return Batch(sum(answer["tokens"]), answer["wall_s"], answer["first_s"])

    async def line(self, timeout_s: float) -> dict[str, Any]:
        """The driver's next line."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise CannotMeasure(f"{self.name} did not answer within {timeout_s:g} s") from None
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise CannotMeasure(f"{self.name} ended; it last said: {said[-1][-300:]}")
        return dict(json.loads(line))


@asynccontextmanager
async def openvino(gguf: Path) -> AsyncIterator[OpenVinoContender]:
    """The driver with the model loaded. It must be installed."""
    log = OPENVINO.folder / "driver.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            str(OPENVINO.python),
            openvino_driver.__file__,
            str(gguf),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            limit=LINE_BYTES,
            preexec_fn=end_with_parent,
        )
    try:
        contender = OpenVinoContender(process, log)
        await contender.line(LOAD_TIMEOUT_S)
        yield contender
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
