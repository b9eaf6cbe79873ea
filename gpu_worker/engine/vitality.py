"""Tells an engine that computes nothing any more from requests that cannot be computed.

A device that is lost fails every forward pass at once, so its worker would be the least loaded of all, attract the
mesh's traffic and answer each request with an error for ever. A stream of bad requests looks the same from outside;
only the latter leaves the warm-up prompt computable.
"""

import logging
from collections.abc import Sequence as Many

from gpu_worker.engine.api import ChoicePlan, EngineInfo, Plan
from gpu_worker.engine.kv import BlockPool
from gpu_worker.engine.runner import Outcome, Runner
from gpu_worker.engine.sequence import Piece, Request, Sequence
from mesh.blocks import BLOCK_TOKENS
from mesh.sampling import Sampling

# Steps in a row in which everything failed, before the engine is put to the proof.
BARREN_STEPS = 3

log = logging.getLogger(__name__)


class EngineBroken(Exception):
    """The engine cannot compute even what it computed when it was loaded. Only a fresh process helps."""


def warm_up_plan(info: EngineInfo, max_tokens: int) -> Plan:
    """A short greedy request that any model can answer; its prompt fits one block."""
    prompt = [token % info.vocab_size for token in range(min(BLOCK_TOKENS // 2, info.context_tokens - 1))]
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    return Plan(request_id="warm-up", attempt=1, prompt_ids=prompt, choices=[ChoicePlan(0)], sampling=sampling)


class Vitality:
    """Watches what steps come to."""

    def __init__(self, info: EngineInfo, runner: Runner, pool: BlockPool) -> None:
        self._info = info
        self._runner = runner
        self._pool = pool
        self._barren = 0

    def note(self, outcomes: Many[Outcome]) -> None:
        """One step's outcomes. Raises EngineBroken if nothing succeeds any more, the warm-up prompt included."""
        if not outcomes:
            return
        self._barren = self._barren + 1 if all(outcome.error for outcome in outcomes) else 0
        if self._barren >= BARREN_STEPS:
            self._barren = 0
            self._prove()

    def _prove(self) -> None:
        block = self._pool.allocate()
        if block is None:  # all held by sequences that had no piece in this step: the next steps try those
            return
        plan = warm_up_plan(self._info, 1)
        sequence = Sequence(Request(plan, b"", 0.0), 0, 0, list(plan.prompt_ids), 0, BLOCK_TOKENS, blocks=[block])
        try:
            self._runner.clear([block])
            [outcome] = self._runner.run([Piece(sequence, 0, len(sequence.ids))], self._info.eos_token_ids)
        except Exception as error:
            raise EngineBroken(f"{BARREN_STEPS} steps in a row failed, and so does the warm-up prompt") from error
        finally:
            self._pool.release([block])
        if outcome.error:
            raise EngineBroken(f"{BARREN_STEPS} steps in a row failed, and the warm-up prompt gives no usable numbers")
        log.warning("%d steps in a row failed, but the engine works: the requests were bad", BARREN_STEPS)
