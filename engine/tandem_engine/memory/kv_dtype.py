"""The dtype of KV pages: from `--kv-cache-dtype`, or the model's."""

import torch

from tandem_engine.config import KvCacheDtype
from tandem_engine.errors import ConfigError

DTYPES = {
    KvCacheDtype.FLOAT32: torch.float32,
    KvCacheDtype.BFLOAT16: torch.bfloat16,
    KvCacheDtype.FLOAT16: torch.float16,
    KvCacheDtype.FP8: torch.float8_e4m3fn,
    KvCacheDtype.FP8_E4M3: torch.float8_e4m3fn,
    KvCacheDtype.FP8_E5M2: torch.float8_e5m2,
}
E4M3_CAPABILITY = (8, 9)
"""Compute capability of the first devices that convert to e4m3."""


def kv_dtype(requested: KvCacheDtype, model_dtype: torch.dtype) -> torch.dtype:
    """Of the pages of a model that computes in `model_dtype`."""
    return model_dtype if requested is KvCacheDtype.AUTO else DTYPES[requested]


def require_kv_dtype(requested: KvCacheDtype, device: str) -> None:
    """Raise `ConfigError` unless attention on `device`, which is there, reads such pages."""
    flag = f"--kv-cache-dtype {requested}"
    if device == "cpu":
        if requested is KvCacheDtype.FLOAT16:
            raise ConfigError(f"{flag} needs a GPU: attention on a CPU reads float32, bfloat16, fp8_e4m3 and fp8_e5m2")
    elif DTYPES.get(requested) is torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY:
        raise ConfigError(
            f"{flag} needs a GPU of compute capability {'.'.join(map(str, E4M3_CAPABILITY))} or more, and "
            f"{torch.cuda.get_device_name(device)} has less: fp8_e5m2 takes as little memory, bfloat16 is exact"
        )
