"""Compiles one text for one vocabulary, and tries the result before it is handed on, so that the engine meets no
surprise in a step. Knows nothing of processes: who calls it sees that it ends (grammar_process.py).
"""

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from gpu_worker.engine.vocabulary import tokenizer_info
from mesh.sampling import Structure

if TYPE_CHECKING:
    import xgrammar

MOST_COMPILED_BYTES = 64 << 20
MOST_WHITESPACE = 64  # between two parts of JSON: indentation, but not for ever
TRIED_TOKENS = 64
SLOWEST_TRIED_S = 0.1
OUT_OF_MEMORY = "std::bad_alloc"  # in a RuntimeError of the compiler's

# What to change about a text that costs too much.
_CHEAPER: dict[Structure, str] = {
    "json_schema": "give it fewer alternatives (anyOf, oneOf), fewer properties that may be left out, or smaller bounds"
    " (maxItems, maxLength)",
    "regex": "give it fewer alternatives or shorter repetitions",
    "grammar": "give it fewer alternatives, or rules that overlap less",
}


class Setup(msgspec.Struct, frozen=True):
    """Whose tokens, and how much processor time one text may take."""

    tokenizer: str
    vocab_size: int
    end_ids: list[int]
    limit_s: float


class Job(msgspec.Struct, frozen=True, tag=True):
    """Compile `text`; the answer comes under the same number."""

    number: int
    structure: Structure
    text: str


class Compiled(msgspec.Struct, frozen=True):
    """`error` says why there is none, for the client."""

    number: int
    serialized: str = ""
    error: str = ""


def too_much(job: Job, what: str) -> Compiled:
    """The refusal of a text that costs too much of `what`."""
    return Compiled(job.number, error=f"it takes too much {what}; {_CHEAPER[job.structure]}")


class Workshop:
    def __init__(self, setup: Setup) -> None:
        """Reads the vocabulary. Starts no threads, now or later, so that its process can be forked."""
        import xgrammar

        info = tokenizer_info(Path(setup.tokenizer), setup.vocab_size, setup.end_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = setup.vocab_size

    def compiled(self, job: Job) -> Compiled:
        try:
            return self._made(job)
        except MemoryError:
            return too_much(job, "memory to compile")
        except (RuntimeError, ValueError) as error:
            if OUT_OF_MEMORY in str(error):
                return too_much(job, "memory to compile")
            return Compiled(job.number, error=_plain(error))

    def _made(self, job: Job) -> Compiled:
        """Raises what the compiler raises."""
        grammar = self._compile(job)
        if grammar.memory_size_bytes > MOST_COMPILED_BYTES:
            return too_much(job, "memory when compiled")
        return self._tried(job, grammar) or Compiled(job.number, serialized=grammar.serialize_json())

    def _compile(self, job: Job) -> "xgrammar.CompiledGrammar":
        match job.structure:
            case "json_schema":
                return self._compiler.compile_json_schema(job.text, max_whitespace_cnt=MOST_WHITESPACE)
            case "regex":
                return self._compiler.compile_regex(job.text)
            case "grammar":
                return self._compiler.compile_grammar(job.text)

    def _tried(self, job: Job, grammar: "xgrammar.CompiledGrammar") -> Compiled | None:
        """Follow it along a random way. The refusal if nothing satisfies it or its masks are slow."""
        import xgrammar

        matcher, chance = xgrammar.GrammarMatcher(grammar), random.Random(0)
        bits = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32)
        for _ in range(TRIED_TOKENS):
            began_s = time.thread_time()
            matcher.fill_next_token_bitmask(bits)
            said = np.unpackbits(bits.numpy()[0].view(np.uint8), bitorder="little", count=self._vocab_size)
            allowed = np.flatnonzero(said)
            if not len(allowed):
                return Compiled(job.number, error="nothing satisfies it")
            if not matcher.accept_token(int(chance.choice(allowed))) or matcher.is_terminated():
                break
            if time.thread_time() - began_s > SLOWEST_TRIED_S:
                return too_much(job, "time per token")
        return None


def _plain(error: Exception) -> str:
    """The compiler's words without the place in its source, and not whatever length of the client's own text."""
    text = str(error).strip().partition("\n")[0]
    if text.startswith("["):
        text = text.partition(": ")[2] or text
    return text[:300] or type(error).__name__
