"""The seam between the engine and whoever drives it: plain messages and one protocol.

The messages are msgspec structs because they cross a process border (engine/process.py ⇄ gpu_worker/bridge.py); tests
and simulators call the same `Engine` in process. Nothing here knows protobuf, asyncio or torch.
"""

from enum import IntEnum
from typing import Protocol

import msgspec

from gpu_worker.engine.transfer import Transfer
from mesh.errors import ShoalError
from mesh.sampling import Sampling


class Reason(IntEnum):
    """Why a choice ended. Values are those of shoal.types.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    PARKED = 3
    ERROR = 4


class ChoicePlan(msgspec.Struct, frozen=True):
    """One of a request's n answers. `emitted_ids` is what the client has already; the choice goes on after it."""

    index: int
    emitted_ids: list[int] = []


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine sees it. (request_id, attempt) is its identity."""

    request_id: str
    attempt: int
    prompt_ids: list[int]
    choices: list[ChoicePlan]
    sampling: Sampling  # seed is set: a random choice is a function of (seed, choice index, output position)
    cache_salt: bytes = b""
    adapter: str = ""
    fetched: tuple[int, int] = (0, 0)  # blocks [first, last) of the prompt came from the shared tier for this request
    waited_ms: int = 0  # before it was submitted, for them


class Logprob(msgspec.Struct, frozen=True):
    """ln p of a token at temperature 1, before truncation; `top` holds the likeliest, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's, counted from token ids. `cached` maps a KvTier value to prompt tokens that were not computed."""

    prompt_tokens: int
    completion_tokens: int  # newly emitted, summed over choices; a token that ends a choice counts
    cached: dict[int, int] = {}
    recomputed_tokens: int = 0
    precision: str = "fp32"
    queue_ms: int = 0
    first_token_ms: int = 0
    steps: int = 0  # from the first that held it to the last
    median_step_ms: float = 0.0  # of those
    max_step_ms: float = 0.0


class AcceptedEvent(msgspec.Struct, frozen=True, tag="accepted"):
    """The request got its first place in a step. Comes once, before its first TokensEvent."""

    request_id: str
    attempt: int
    cached: dict[int, int]
    queue_ms: int


class TokensEvent(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens of one choice; `position` is the output position of ids[0]."""

    request_id: str
    attempt: int
    choice: int
    position: int
    ids: list[int]
    logprobs: list[Logprob] = []


class FinishedEvent(msgspec.Struct, frozen=True, tag="finished"):
    """The end of one choice. `usage` covers this attempt so far; `last` = no choice of it is left here.

    `completion_tokens` counts this choice's output, emitted_ids of earlier attempts included. A stop token counts, is
    named by `stop_token_id` and comes in no TokensEvent.
    """

    request_id: str
    attempt: int
    choice: int
    reason: Reason
    completion_tokens: int
    usage: Usage
    last: bool
    stop_token_id: int | None = None
    message: str = ""


Event = AcceptedEvent | TokensEvent | FinishedEvent


class KvUse(msgspec.Struct, frozen=True, kw_only=True):
    """How well the KV pool is used. All but the first two are counts since the engine started."""

    unwritten_ratio: float = 0.0  # share of used blocks' slots that no token fills
    host_bytes: int = 0  # host memory that holds swapped KV
    partial_hits: int = 0  # prompts that went on inside a block that begins like them
    copied_blocks: int = 0  # because others read them
    recomputed_sequences: int = 0  # gave way, to compute again
    swapped_sequences: int = 0  # gave way, copied to the host
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine stands after a step. free + cached + used = total, always."""

    steps: int
    waiting_sequences: int
    running_sequences: int
    queued_prefill_tokens: int
    prefilling_sequences: int  # of both, those whose prompt is not computed yet
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    committed_blocks: int  # used plus what running requests may still grow into (prompt + max_tokens)
    total_blocks: int
    prefill_tokens_per_s: float  # 0 = not yet known
    decode_tokens_per_s: float
    median_step_ms: float
    preemptions: int
    running: list[tuple[str, int]]  # (request_id, attempt) of all that runs or waits
    batch_limit: int = 0  # choices that may run
    prompt_budget_tokens: int = 0  # what the last step could spend on prompts
    prompt_budget_ms: float = 0.0
    kv: KvUse = KvUse()
    computed: dict[str, int] = {}  # request_id -> prompt + emitted tokens whose KV is ready


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of one run of the runner went.

    attention      a layer's half with its norm: projections, RoPE, KV written and read
    feed_forward   its other half, with its norm
    sampling       from logits to tokens
    other          all else: batches made, embedding, the last norm and the head
    """

    attention_s: float
    feed_forward_s: float
    sampling_s: float
    other_s: float


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one step changed. Block keys are chain keys (mesh/blocks.py) the prefix cache gained and lost."""

    events: list[Event]
    load: EngineLoad
    duration_ms: float
    parts: Parts | None = None  # of a step whose kernels were timed
    prompt_tokens: int = 0  # computed for the first time
    recomputed_tokens: int = 0  # prompt and output whose KV a preemption or a move had lost
    blocks_stored: list[bytes] = []
    blocks_evicted: list[bytes] = []
    blocks_computed: dict[bytes, list[bytes]] = {}  # of those stored, by namespace: computed here, parents first
    blocks_parked: dict[bytes, list[bytes]] = {}  # by namespace, parents first: of choices that ended with PARKED


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; fixed after loading."""

    model: str
    architecture: str
    model_digest: bytes
    tokenizer_digest: bytes
    vocab_size: int
    context_tokens: int
    eos_token_ids: list[int]
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    precision: str
    total_blocks: int
    max_sequences: int
    device: str
    simulated: bool = False
    preset: str = "mixed"  # presets.py
    policy: str = "continuous"  # static = the naive baseline


class Engine(Protocol):
    """What a worker drives. Synchronous; one thread. No method but `step` does work that grows with a prompt."""

    info: EngineInfo
    transfer: Transfer  # moves whole blocks in and out between steps

    def submit(self, plan: Plan) -> None:
        """Queue a request for the next steps.

        Raises InvalidRequest (names the field: it can never run), Overloaded with retry_after_s (no room now), or
        AlreadyExists (this attempt or a newer one is here). A newer attempt aborts the older one.
        """

    def abort(self, request_id: str, attempt: int) -> None:
        """Free everything the attempt holds before the next step. No event follows. Unknown ids are ignored."""

    def park(self, request_id: str, attempt: int) -> None:
        """End the attempt with PARKED at the next step. Unknown ids are ignored."""

    def stop_choice(self, request_id: str, attempt: int, choice: int, keep_tokens: int) -> None:
        """End one choice with STOP at the next step, its output counted as `keep_tokens`. Unknown ids are ignored."""

    def step(self) -> StepResult:
        """Advance every running sequence as far as one step's token budget allows. A sequence that fails ends alone.

        Whatever it raises means that the engine is broken as a whole.
        """

    def has_work(self) -> bool:
        """Whether `step` would advance anything or has an event to give."""

    @property
    def preparing(self) -> bool:
        """Whether a step may soon have more work, though nothing is submitted: a grammar is being compiled."""

    def use_leisure(self) -> None:
        """There is time: get ready, in the background, for what nobody has asked for yet (grammars)."""

    def take_refused(self) -> list[tuple[Plan, ShoalError]]:
        """Plans that were submitted and turned out to be ones that can never run, since this was last asked: no event
        of them has come, nor will.
        """

    def block_keys(self) -> list[bytes]:
        """Chain keys of all blocks that the prefix cache holds (for a snapshot)."""
