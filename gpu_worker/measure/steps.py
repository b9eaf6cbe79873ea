"""How long a decode step takes, by the number of sequences and by their context.

The prompts' KV is not computed but put into the pool as blocks that came from elsewhere would be, so a context of
thousands of tokens costs a copy; a step's time does not depend on what the blocks hold. What runs is the engine whole.
"""

import random
from statistics import median
from typing import Any

import msgspec

from gpu_worker.engine.api import ChoicePlan, Engine, Plan, StepResult, TokensEvent
from gpu_worker.engine.build import build_engine
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.sequence import blocks_for
from gpu_worker.measure.work import parameters
from mesh.blocks import BLOCK_TOKENS, chain_keys, namespace
from mesh.sampling import Sampling

WARM_STEPS = 4  # of each shape, not counted
NO_LIMIT = 1 << 30
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}  # of a weight


class Steps:
    """An engine and the block that stands for all KV."""

    def __init__(self, config: EngineConfig, steps: int) -> None:
        self._config = msgspec.structs.replace(config, max_waiting_tokens=NO_LIMIT, kv_promised=1e6)
        self._steps = steps
        self._engine: Engine = build_engine(self._config, lambda fraction, what: None)
        self._rng = random.Random(0)
        info = self._engine.info
        self._root = namespace(info.model_digest, info.tokenizer_digest, "", b"")
        self._block = self._any_block()

    def median_ms(self, batch: int, context: int) -> float | None:
        """Of steps in which `batch` sequences decode, the last at `context` tokens; None where they do not fit."""
        info, new = self._engine.info, WARM_STEPS + self._steps
        beyond = batch > info.max_sequences or batch * (blocks_for(context) + 1) > info.total_blocks
        if beyond or not new < context <= info.context_tokens:
            return None
        for number in range(batch):
            self._submit(f"{batch}x{context}-{number}", context - new, new)
        found = [step.duration_ms for step in self._run() if _decodes(step) == batch]
        return median(found[WARM_STEPS:] or found)

    def work(self) -> dict[str, Any]:
        """What a step has to do, for its bounds: bytes of weights, operations a token, bytes of KV a token."""
        info, weights = self._engine.info, parameters(self._config.model)
        return {
            "precision": info.precision,
            "weight_bytes": weights * BYTES[info.precision],
            "operations_per_token": 2 * weights,
            "kv_bytes_per_token": len(self._block) / BLOCK_TOKENS,
        }

    def _submit(self, name: str, prompt_tokens: int, new: int) -> None:
        ids = [self._rng.randrange(self._engine.info.vocab_size) for _ in range(prompt_tokens)]
        if self._block:
            for key in chain_keys(self._root, ids[:-1]):
                self._engine.transfer.load(key, self._block)
        sampling = Sampling(max_tokens=new, temperature=0.0, seed=0, ignore_eos=True)
        choices = [ChoicePlan(0)]
        self._engine.submit(Plan(request_id=name, attempt=1, prompt_ids=ids, choices=choices, sampling=sampling))

    def _any_block(self) -> bytes:
        """A block's real content, computed here; empty where blocks hold nothing, as a simulated engine's."""
        ids = list(range(BLOCK_TOKENS + 1))
        sampling = Sampling(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        plan = Plan(request_id="block", attempt=1, prompt_ids=ids, choices=[ChoicePlan(0)], sampling=sampling)
        self._engine.submit(plan)
        self._run()
        content = self._engine.transfer.dump(chain_keys(self._root, ids)[0])
        return bytes(content) if content is not None else b""

    def _run(self) -> list[StepResult]:
        found = []
        while self._engine.has_work():
            found.append(self._engine.step())
        return found


def _decodes(step: StepResult) -> int:
    """Tokens that the step gave if it did nothing but decode, else 0."""
    tokens = sum(len(event.ids) for event in step.events if isinstance(event, TokensEvent))
    return 0 if step.prompt_tokens or step.recomputed_tokens else tokens
