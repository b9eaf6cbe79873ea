"""What the relay asks for: a request's demand at the scheduler, and each attempt's job at a worker."""

import asyncio
from collections.abc import Sequence

from gateway.catalogue import Catalogue
from gateway.choice import unfinished
from gateway.output import Output
from gateway.request import Request
from mesh.blocks import BLOCK_TOKENS, KEY_BYTES, chain_keys
from mesh.clients.attempt import Job
from mesh.clients.placement import Demand, Grant

# Hashing a longer prompt's blocks is work for a thread; a shorter one takes less than a millisecond.
HASH_INLINE_TOKENS = 4096


async def demand_of(request: Request, catalogue: Catalogue, expected_tokens: int) -> Demand:
    """What placement needs to know; `expected_tokens` is per choice."""
    root = catalogue.namespace(request.model, request.tenant.salt)
    return Demand(
        meta=request.meta,
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.sampling.max_tokens,
        expected_tokens=expected_tokens,
        choices=request.choices,
        block_keys=await _block_keys(root, request.prompt_ids) if root else b"",
        namespace=root,
        tokenizer_digest=catalogue.text(request.model).tokenizer_digest,
        session_id=request.session_id,
        features=features_of(request),
    )


def job_of(request: Request, catalogue: Catalogue, output: Output, grant: Grant) -> Job:
    """The prompt, and what each unfinished choice has emitted; weights and numerics are pinned after the first."""
    choices = unfinished(output.choices)
    return Job(
        meta=request.meta,
        attempt=grant.attempt,
        worker_id=grant.worker_id,
        prompt_ids=request.prompt_ids,
        choices=choices,
        features=features_of(request, resumed=any(choices.values())),
        sampling=request.sampling,
        tokenizer_digest=catalogue.text(request.model).tokenizer_digest,
        cache_salt=request.tenant.salt,
        model_digest=output.tally.model_digest,
        precision=output.tally.precision,
    )


def features_of(request: Request, *, resumed: bool = False) -> tuple[str, ...]:
    """What a worker must know to give this answer (gpu_worker/identity.py has the words): one that is older than a
    feature refuses, where it would have ignored a field that it never heard of.
    """
    sampling = request.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    depends = {
        "choices": request.choices > 1,
        "logit_bias": bool(sampling.logit_bias),
        "logprobs": sampling.top_logprobs is not None,
        "min_p": sampling.min_p > 0,
        "min_tokens": sampling.min_tokens > 0,
        "penalties": penalties != (0, 0, 1),
        "resume": resumed,
        "seed": sampling.temperature > 0,  # drawn if not given: the same on every attempt
        "stop_choices": bool(request.stop),
        "stop_token_ids": bool(sampling.stop_token_ids),
        "structure": sampling.structure is not None,
    }
    return tuple(name for name, needed in depends.items() if needed)


async def more_block_keys(request: Request, catalogue: Catalogue, output: Output) -> bytes:
    """Keys of the full blocks that the one unfinished choice added to the prompt's; of several, none lead all."""
    root, running = catalogue.namespace(request.model, request.tenant.salt), unfinished(output.choices)
    if not root or len(running) != 1:
        return b""
    [emitted] = running.values()
    keys = await _block_keys(root, [*request.prompt_ids, *emitted])
    return keys[len(request.prompt_ids) // BLOCK_TOKENS * KEY_BYTES :]


async def _block_keys(root: bytes, ids: Sequence[int]) -> bytes:
    """Chain keys of full blocks, concatenated. A long prompt is hashed beside the event loop."""
    if len(ids) <= HASH_INLINE_TOKENS:
        return b"".join(chain_keys(root, ids))
    return b"".join(await asyncio.to_thread(chain_keys, root, ids))
