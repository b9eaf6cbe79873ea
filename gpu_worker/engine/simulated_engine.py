"""The engine that computes nothing, for driving a mesh without weights or a GPU. It says so wherever it is named.

All but the forward pass is the real thing: admission, schedule, block pool, prefix cache, preemption, events. Of the
model folder only the tokenizer is needed; what else is there (config.json, a GGUF's metadata) is believed.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_worker.engine.api import EngineInfo
from gpu_worker.engine.build import assemble, pool_blocks
from gpu_worker.engine.config import EngineConfig
from gpu_worker.engine.engine import BatchingEngine
from gpu_worker.engine.presets import settled
from gpu_worker.engine.simulated_runner import SimulatedRunner
from gpu_worker.engine.simulated_time import TimingModel
from gpu_worker.engine.simulated_words import Words, vocabulary_size, word_ids
from gpu_worker.models.endings import eos_token_ids
from gpu_worker.models.errors import LoadError
from gpu_worker.models.json_file import read_json
from mesh.blocks import BLOCK_TOKENS
from mesh.models import ModelFolder, find

if TYPE_CHECKING:
    from gpu_worker.models.checkpoint import Progress

# A GPU of 80 GB, less 16 GB of weights and room to work in.
KV_BYTES = 40 << 30
# Where the folder says nothing of it.
CONTEXT_TOKENS = 32_768
SIMULATED = "simulated"
# Changes with what answers are made of: unlike workers must not finish each other's.
_WORDS_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What of a model a simulation must get right."""

    architecture: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]


def build_simulated(config: EngineConfig, progress: "Progress") -> BatchingEngine:
    """Raises LoadError, or InvalidRequest if there is no such model."""
    folder = find(config.model)
    progress(0.0, "reading what the model folder says, but no weights")
    return around(config, folder)


def around(config: EngineConfig, folder: ModelFolder) -> BatchingEngine:
    """An engine that simulates a model by what its folder says. Raises LoadError."""
    config = settled(config)
    facts = facts_of(folder)
    words = word_ids(folder.tokenizer, facts.vocab_size, facts.eos_token_ids)
    runner = SimulatedRunner(timing_of(config), Words(words, config.simulated_answer_tokens))
    return assemble(config, _info(config, folder, facts), runner)


def timing_of(config: EngineConfig) -> TimingModel:
    """The settings in seconds."""
    return TimingModel(
        step_s=config.simulated_step_ms / 1e3,
        prefill_tokens_per_s=config.simulated_prefill_tokens_per_s,
        row_s=config.simulated_row_us / 1e6,
        context_token_s=config.simulated_context_us / 1e6,
    )


def facts_of(folder: ModelFolder) -> ModelFacts:
    """From config.json, else the one GGUF's metadata, else the tokenizer alone. Raises LoadError."""
    config, ggufs = folder.path / "config.json", sorted(folder.path.glob("*.gguf"))
    if config.is_file():
        named = read_json(config)
        architecture = str((named.get("architectures") or [SIMULATED])[0])
        numbers = named.get("vocab_size"), named.get("max_position_embeddings", CONTEXT_TOKENS)
        return _facts(folder, architecture, *numbers, named.get("eos_token_id"))
    if len(ggufs) == 1:
        from gpu_worker.models.gguf_metadata import GgufMetadata

        metadata = GgufMetadata(ggufs[0])
        numbers = metadata.vocab_size, metadata.context_tokens
        return _facts(folder, metadata.architecture, *numbers, metadata.eos_token_ids)
    return _facts(folder, SIMULATED, vocabulary_size(folder.tokenizer), CONTEXT_TOKENS, None)


def _facts(folder: ModelFolder, architecture: str, vocab_size: Any, context_tokens: Any, eos: Any) -> ModelFacts:
    for name, value in (("vocab_size", vocab_size), ("context length", context_tokens)):
        if not isinstance(value, int) or value < 2:
            raise LoadError(folder.path, f"{name} is {value!r}; expected a number of tokens")
    return ModelFacts(architecture, vocab_size, context_tokens, eos_token_ids(folder, eos, vocab_size))


def _info(config: EngineConfig, folder: ModelFolder, facts: ModelFacts) -> EngineInfo:
    longest = min(facts.context_tokens, config.context_tokens or facts.context_tokens)
    per_token = config.simulated_kv_bytes_per_token
    total = pool_blocks(config, folder.path, per_token * BLOCK_TOKENS, config.kv_bytes or KV_BYTES, longest)
    tokenizer_digest = folder.tokenizer_digest()
    return EngineInfo(
        model=folder.name,
        architecture=facts.architecture,
        model_digest=_digest(config, facts, tokenizer_digest),
        tokenizer_digest=tokenizer_digest,
        vocab_size=facts.vocab_size,
        context_tokens=min(longest, total * BLOCK_TOKENS),
        eos_token_ids=list(facts.eos_token_ids),
        block_tokens=BLOCK_TOKENS,
        layers=1,
        kv_heads=1,
        head_dim=per_token,
        kv_dtype=SIMULATED,
        precision=SIMULATED,
        total_blocks=total,
        max_sequences=config.max_sequences,
        device=SIMULATED,
        simulated=True,
    )


def _digest(config: EngineConfig, facts: ModelFacts, tokenizer_digest: bytes) -> bytes:
    """32 bytes over all that tokens depend on; never those of real weights, so neither KV nor answers mix."""
    parts = [
        _WORDS_VERSION,
        tokenizer_digest.hex(),
        facts.vocab_size,
        facts.eos_token_ids,
        config.simulated_answer_tokens,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=32, person=b"shoal-simulated").digest()
