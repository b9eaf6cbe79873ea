"""The process in which grammars are compiled: `python -m gpu_worker.engine.grammar_process`, started by the engine's.

A grammar from a client may take for ever or all memory to compile, or bring the compiler down. Here that ends this
process and nothing else: an alarm kills it when a grammar's time is over, even inside native code, and a limit stops
its memory. It yields the cores to the engine, so the limit is of processor time; by the clock it is WAITING times that.
What it has compiled is tried before it is handed on, so that the engine meets no surprise in a step.
"""

import os
import random
import resource
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from gpu_worker.engine.vocabulary import tokenizer_info
from mesh.sampling import Structure

if TYPE_CHECKING:
    import xgrammar

MOST_DATA_BYTES = 3 << 30
MOST_COMPILED_BYTES = 64 << 20
MOST_WHITESPACE = 64  # between two parts of JSON: indentation, but not for ever
TRIED_TOKENS = 64
SLOWEST_TRIED_S = 0.1
YIELDING = 5  # added to its niceness
WAITING = 4.0


class Setup(msgspec.Struct, frozen=True):
    """The first message: whose tokens, and how long one grammar may take."""

    tokenizer: str
    vocab_size: int
    end_ids: list[int]
    limit_s: float  # of processor time


class Job(msgspec.Struct, frozen=True):
    structure: Structure
    text: str


class Compiled(msgspec.Struct, frozen=True):
    """`error` says why there is none, for the client."""

    serialized: str = ""
    error: str = ""


def main(fd: int) -> None:
    """Until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the engine's end is ours
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    os.nice(YIELDING)
    with Connection(fd) as port:
        try:
            setup = msgspec.msgpack.decode(port.recv_bytes(), type=Setup)
            workshop = Workshop(setup)
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_DATA_BYTES, MOST_DATA_BYTES))
            port.send_bytes(b"")
            while True:
                job = msgspec.msgpack.decode(port.recv_bytes(), type=Job)
                _limit(setup.limit_s)
                port.send_bytes(msgspec.msgpack.encode(workshop.compiled(job)))
                _limit(0)
        except (EOFError, OSError):
            return


def _limit(seconds: float) -> None:
    """This process ends when the time is over; 0 = never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITING)


class Workshop:
    """Compiles for one vocabulary."""

    def __init__(self, setup: Setup) -> None:
        import xgrammar

        info = tokenizer_info(Path(setup.tokenizer), setup.vocab_size, setup.end_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = setup.vocab_size

    def compiled(self, job: Job) -> Compiled:
        try:
            grammar = self._compile(job)
        except (RuntimeError, ValueError, MemoryError) as error:
            return Compiled(error=_plain(error))
        if grammar.memory_size_bytes > MOST_COMPILED_BYTES:
            return Compiled(error="it is too large when compiled")
        wrong = self._tried(grammar)
        return Compiled(error=wrong) if wrong else Compiled(serialized=grammar.serialize_json())

    def _compile(self, job: Job) -> "xgrammar.CompiledGrammar":
        match job.structure:
            case "json_schema":
                return self._compiler.compile_json_schema(job.text, max_whitespace_cnt=MOST_WHITESPACE)
            case "regex":
                return self._compiler.compile_regex(job.text)
            case "grammar":
                return self._compiler.compile_grammar(job.text)

    def _tried(self, grammar: "xgrammar.CompiledGrammar") -> str:
        """Follow it along a random way. What is wrong with it: nothing satisfies it, or its masks are slow."""
        import xgrammar

        matcher, chance = xgrammar.GrammarMatcher(grammar), random.Random(0)
        bits = torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32)
        for _ in range(TRIED_TOKENS):
            began_s = time.thread_time()
            matcher.fill_next_token_bitmask(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little"))
            if not len(allowed):
                return "nothing satisfies it"
            if not matcher.accept_token(int(chance.choice(allowed))) or matcher.is_terminated():
                break
            if time.thread_time() - began_s > SLOWEST_TRIED_S:
                return "it takes too long per token"
        return ""


def _plain(error: Exception) -> str:
    """The compiler's words without the place in its source, and not whatever length of the client's own text."""
    text = str(error).strip().partition("\n")[0]
    if text.startswith("["):
        text = text.partition(": ")[2] or text
    return text[:300] or type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]))
