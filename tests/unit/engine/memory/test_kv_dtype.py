"""Which dtype KV pages have, and where it is refused."""

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import KvCacheDtype
from tandem_engine.memory import pool
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


@pytest.fixture
def a100(monkeypatch):
    """And a Triton that converts to e5m2 there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(pool, "version", lambda _: "3.7.1")


def test_e4m3_needs_a_device_that_converts_to_it(a100, monkeypatch):
    require_kv_dtype(KvCacheDtype.FP8_E5M2, "cuda")
    for kind in (KvCacheDtype.FP8, KvCacheDtype.FP8_E4M3):
        with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8.9 .* NVIDIA A100 has less: fp8_e5"):
            require_kv_dtype(kind, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    require_kv_dtype(KvCacheDtype.FP8, "cuda:1")


def test_float8_that_triton_cannot_compile_names_flag_and_remedy(a100, monkeypatch):
    """Triton 3.6, which torch 2.11 brings, fails at the first launch on such a device."""
    monkeypatch.setattr(pool, "version", lambda _: "3.6.0")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e5m2 on NVIDIA A100 .* needs Triton 3.7 .* bfloat16"):
        require_kv_dtype(KvCacheDtype.FP8_E5M2, "cuda")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs a GPU .* has less: use bfloat16"):
        require_kv_dtype(KvCacheDtype.FP8, "cuda")
    require_kv_dtype(KvCacheDtype.BFLOAT16, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    require_kv_dtype(KvCacheDtype.FP8_E5M2, "cuda")
