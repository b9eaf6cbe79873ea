"""Who this worker is, and whether a request was meant for it. Pure."""

from dataclasses import dataclass

from gpu_worker.engine.api import EngineInfo
from mesh.blocks import FORMAT_VERSION
from mesh.clients.reports import WorkerFacts
from mesh.errors import Mismatch

# What GenerateRequest.required_features may name: one word for each thing an answer may depend on.
FEATURES = (
    "choices",
    "logit_bias",
    "logprobs",
    "min_p",
    "min_tokens",
    "penalties",
    "resume",
    "seed",
    "stop_choices",
    "stop_token_ids",
    "structure",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """The worker a request was meant for. Empty = any, but for the tokenizer."""

    tokenizer_digest: bytes
    worker_id: str = ""
    model: str = ""
    model_digest: bytes = b""
    precision: str = ""
    adapter: str = ""
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Identity:
    """This process and what its engine serves."""

    worker_id: str
    info: EngineInfo

    def check(self, meant: Meant) -> None:
        """Raise Mismatch, saying which of the two differ, if `meant` is not this worker."""
        info = self.info
        _same("worker", meant.worker_id, self.worker_id)
        _same("model", meant.model, info.model)
        _same("model digest", meant.model_digest.hex(), info.model_digest.hex())
        _same("precision", meant.precision, info.precision)
        if meant.tokenizer_digest != info.tokenizer_digest:
            raise Mismatch("the prompt was made with another tokenizer than this worker's")
        if meant.adapter:
            raise Mismatch(f"this worker has no adapter {meant.adapter!r}")
        if unknown := set(meant.features) - set(FEATURES):
            raise Mismatch(f"this worker does not know {', '.join(sorted(unknown))}")

    def facts(self, *, address: str, pool: str, fault_domain: str, version: str) -> WorkerFacts:
        """What schedulers are told in Hello."""
        info = self.info
        return WorkerFacts(
            worker_id=self.worker_id,
            address=address,
            model=info.model,
            pool=pool,
            model_digest=info.model_digest,
            tokenizer_digest=info.tokenizer_digest,
            block_tokens=info.block_tokens,
            layers=info.layers,
            kv_heads=info.kv_heads,
            head_dim=info.head_dim,
            kv_dtype=info.kv_dtype,
            context_tokens=info.context_tokens,
            total_blocks=info.total_blocks,
            max_sequences=info.max_sequences,
            precision=info.precision,
            version=version,
            block_format_version=FORMAT_VERSION,
            features=FEATURES,
            fault_domain=fault_domain,
            simulated=info.simulated,
        )


def _same(what: str, meant: str, own: str) -> None:
    if meant and meant != own:
        raise Mismatch(f"meant for {what} {meant}, this is {own}")
