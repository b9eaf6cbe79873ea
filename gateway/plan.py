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
    )


def job_of(request: Request, catalogue: Catalogue, output: Output, grant: Grant) -> Job:
    """The prompt, and what each unfinished choice has emitted; weights and numerics are pinned after the first."""
    return Job(
        meta=request.meta,
        attempt=grant.attempt,
        worker_id=grant.worker_id,
        prompt_ids=request.prompt_ids,
        choices=unfinished(output.choices),
        sampling=request.sampling,
        tokenizer_digest=catalogue.text(request.model).tokenizer_digest,
        cache_salt=request.tenant.salt,
        model_digest=output.tally.model_digest,
        precision=output.tally.precision,
    )


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
