"""Chain keys of KV blocks: the one hash by which gateway, scheduler, worker and cache mean the same prefix.

A block is 16 tokens, mesh-wide. Its chain key is blake2b(parent key, token ids); the first block's parent is the
namespace, a digest of everything else its KV depends on. Equal keys mean equal meaning: parts are length-delimited, so
no two different tuples of parts are spelled alike.
"""

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 16
KEY_BYTES = 16
FORMAT_VERSION = 1


def namespace(model_digest: bytes, tokenizer_digest: bytes, adapter: str, salt: bytes) -> bytes:
    """Root of all chains that may share KV. `salt` is the tenant's; equal salts share, others never do."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"shoal-ns")
    for part in (FORMAT_VERSION.to_bytes(4, "little"), model_digest, tokenizer_digest, adapter.encode(), salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the block holding `token_ids` (at most BLOCK_TOKENS of them) after `parent`."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), key=parent, digest_size=KEY_BYTES).digest()


def chain_keys(root: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Keys of the full blocks of `token_ids`, in order. O(tokens); about 1 µs a block."""
    keys = []
    parent = root
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = chain_key(parent, token_ids[start : start + BLOCK_TOKENS])
        keys.append(parent)
    return keys
