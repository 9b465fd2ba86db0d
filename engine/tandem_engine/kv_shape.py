"""What two workers must have in common before one writes into the other's pages: the shape, dtype and meaning of KV."""

import hashlib

import msgspec
import torch

from tandem_engine.config import EngineConfig
from tandem_engine.kernels.float8 import FLOAT8
from tandem_engine.loaded_model import LoadedModel
from tandem_engine.memory.kv_dtype import kv_dtype
from tandem_engine.messages.control import KvGeometry
from tandem_engine.model.kv_scales import scales_digest
from tandem_engine.model.sharing import heads_of_rank
from tandem_engine.parallel.split import OUTPUTS

LAYOUT_VERSION = 2
"""Of `KvPool`, [page, layer, kv, kv_head, slot, head_dim], and of the digests of its pages."""


def compat_hash(geometry: KvGeometry, kv_heads: int, peer_group: str = "") -> str:
    """Digest of everything two workers must share before one writes into the other's pages.

    Not of how many ranks share the model's `kv_heads`: each head goes to whoever holds it there.
    """
    whole = msgspec.structs.replace(geometry, num_kv_heads=kv_heads, tp_size=1)
    group = hashlib.blake2b(peer_group.encode(), digest_size=16).digest() if peer_group else b""
    return hashlib.blake2b(msgspec.msgpack.encode(whole), digest_size=16, key=group).hexdigest()


def kv_geometry(loaded: LoadedModel, config: EngineConfig) -> KvGeometry:
    """Of the pages of this rank."""
    facts, dtype = loaded.model_config, kv_dtype(config.cache.dtype, loaded.dtype)
    return KvGeometry(
        fingerprint=facts.fingerprint,
        num_layers=facts.num_layers,
        num_kv_heads=heads_of_rank(facts, loaded.parallel.size).kv,
        head_dim=facts.head_dim,
        page_size=config.cache.page_size,
        dtype=dtype_name(dtype),
        layout_version=LAYOUT_VERSION,
        tp_size=loaded.parallel.size,
        model_dtype="" if dtype is loaded.dtype else dtype_name(loaded.dtype),
        kv_scales=kv_scales_name(loaded, dtype),
    )


def kv_scales_name(loaded: LoadedModel, dtype: torch.dtype) -> str:
    """See `KvGeometry.kv_scales`."""
    return scales_digest(loaded.kv_scales) if dtype in FLOAT8 else ""


def scales_of_rank(loaded: LoadedModel) -> torch.Tensor:
    """Those of the KV heads that this rank holds."""
    facts, parallel = loaded.model_config, loaded.parallel
    part = OUTPUTS.part(facts.num_kv_heads, rank=parallel.rank, size=parallel.size)
    whole = torch.ones(facts.num_layers, 2, facts.num_kv_heads) if loaded.kv_scales is None else loaded.kv_scales
    return whole[:, :, part.start : part.stop]


def dtype_name(dtype: torch.dtype) -> str:
    """As in flags: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
