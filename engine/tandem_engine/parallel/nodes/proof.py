"""That each connection of a gloo group leads to the rank that it should.

Gloo lets whoever connects first, with the number of the pair, be the other end. So once a group between nodes is
formed, each pair shows that both ends know a secret that stands in the store, which only ranks of this engine can read.
NCCL asks for such a number by itself: the magic of its unique id.
"""

import secrets
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from tandem_engine.errors import RankLostError

PROOF_BYTES = 32
PROOF_KEY = "proof"
"""In the store of the meeting."""

Exchange = Callable[[Tensor, Tensor], None]
"""(output, input), both [ranks, PROOF_BYTES] uint8: row r of the input goes to rank r, and row r of the output is
from rank r."""


def require_proofs(store: Store, exchange: Exchange, *, rank: int, size: int) -> None:
    """Exchange proofs with every rank. `store` is that of this meeting alone.

    Raises `RankLostError` when a connection leads to somebody who does not know the secret.
    """
    if rank == 0:
        store.set(PROOF_KEY, secrets.token_hex(PROOF_BYTES))
    secret = bytes(store.get(PROOF_KEY))
    mine = torch.stack([_tensor(proof(secret, sender=rank, receiver=other)) for other in range(size)])
    theirs = torch.zeros_like(mine)
    exchange(theirs, mine)
    for other in range(size):
        expected = proof(secret, sender=other, receiver=rank)
        if not secrets.compare_digest(theirs[other].numpy().tobytes(), expected):
            raise RankLostError(f"rank {rank} of {size} connected to a process that is not rank {other}")


def proof(secret: bytes, *, sender: int, receiver: int) -> bytes:
    """What rank `sender` shows to rank `receiver`: [PROOF_BYTES]."""
    return blake2b(f"{sender}>{receiver}".encode(), key=secret[:64], digest_size=PROOF_BYTES).digest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
