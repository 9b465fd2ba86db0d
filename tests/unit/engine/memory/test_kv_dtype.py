"""Which dtype KV pages have, and where it is refused."""

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import KvCacheDtype
from tandem_engine.memory.pool import kv_dtype, require_kv_dtype


def test_kv_dtype_defaults_to_model_dtype():
    assert kv_dtype(KvCacheDtype.AUTO, torch.bfloat16) is torch.bfloat16
    assert kv_dtype(KvCacheDtype.FLOAT32, torch.bfloat16) is torch.float32
    assert kv_dtype(KvCacheDtype.FP8, torch.bfloat16) is torch.float8_e4m3fn
    assert kv_dtype(KvCacheDtype.FP8_E5M2, torch.float32) is torch.float8_e5m2


def test_cpu_reads_all_but_float16():
    for kind in set(KvCacheDtype) - {KvCacheDtype.FLOAT16}:
        require_kv_dtype(kind, "cpu")
    with pytest.raises(ConfigError, match="--kv-cache-dtype float16 needs a GPU"):
        require_kv_dtype(KvCacheDtype.FLOAT16, "cpu")


def test_e4m3_needs_a_device_that_converts_to_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    require_kv_dtype(KvCacheDtype.FP8_E5M2, "cuda")
    for kind in (KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3):
        with pytest.raises(ConfigError, match="needs a GPU of compute capability 8.9 .* NVIDIA A100 has less"):
            require_kv_dtype(kind, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    require_kv_dtype(KvCacheDtype.FP8, "cuda:1")
