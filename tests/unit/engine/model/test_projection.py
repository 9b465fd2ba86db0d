"""A projection gives the same numbers in whatever layout it keeps its weight."""

import pytest
import torch

from tandem_engine.kernels.cpu import panels as fused_projection
from tandem_engine.model.layers.linear import (
    FEW_TOKENS,
    MIN_PACKED_ELEMENTS,
    NEAR_TOKENS,
    Linear,
    PackedLinear,
    padded_tokens,
    projection,
)

LARGE, SMALL = (300, 256), (30, 25)


@pytest.fixture
def packs() -> None:
    available = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not available:
        pytest.skip("oneDNN has no blocked layout for this CPU")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5, FEW_TOKENS, FEW_TOKENS + 1, 64, 200])
def test_packed_projection_equals_the_plain_one(packs, tokens, bias):
    weight, offset = torch.randn(LARGE) / 16, torch.randn(LARGE[0]) if bias else None
    x = torch.randn(tokens, LARGE[1])
    packed = projection(weight, offset)
    assert isinstance(packed, PackedLinear)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), Linear(weight=weight, bias=offset)(x), atol=1e-5, rtol=0)


def test_packed_bfloat16_projection_accumulates_in_float32(packs):
    weight, x = (torch.randn(LARGE) / 16).bfloat16(), torch.randn(5, LARGE[1]).bfloat16()
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(projection(weight)(x).double(), exact, atol=1e-2, rtol=1 / 128)


def test_inputs_need_not_be_contiguous(packs):
    weight, wide = torch.randn(LARGE) / 16, torch.randn(4, 2 * LARGE[1])
    x = wide[:, : LARGE[1]]
    torch.testing.assert_close(projection(weight)(x), x @ weight.T, atol=1e-5, rtol=0)


def test_small_weight_stays_as_it_is():
    weight = torch.randn(SMALL)
    assert weight.numel() < MIN_PACKED_ELEMENTS
    assert projection(weight) == Linear(weight=weight, bias=None)


def test_other_dtypes_stay_as_they_are():
    assert isinstance(projection(torch.randn(LARGE).double()), Linear)


def test_packing_keeps_no_hold_on_the_caller_s_weight(packs):
    weight, x = torch.randn(LARGE) / 16, torch.randn(3, LARGE[1])
    packed = projection(weight)
    before = packed(x)
    weight.zero_()
    assert torch.equal(packed(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_tokens_have_the_same_bits_in_any_batch(packs, dtype):
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies no bfloat16 on this CPU")
    weight, offset = (torch.randn(LARGE) / 16).to(dtype), torch.randn(LARGE[0]).to(dtype)
    packed, x = projection(weight, offset), torch.randn(FEW_TOKENS, LARGE[1]).to(dtype)
    assert isinstance(packed, PackedLinear)
    if packed.few is None:
        pytest.skip("oneDNN keeps weights otherwise on this CPU")
    together = packed(x)
    assert torch.equal(together, torch.cat([packed(row[None]) for row in x]))
    torch.testing.assert_close(together, Linear(weight=weight, bias=offset)(x), atol=2**-7, rtol=2**-7)


def test_layout_that_is_not_panels_is_left_to_onednn(packs, monkeypatch):
    monkeypatch.setattr(fused_projection, "in_place", lambda *_: None)
    weight, x = torch.randn(LARGE) / 16, torch.randn(3, LARGE[1])
    packed = projection(weight)
    assert isinstance(packed, PackedLinear)
    torch.testing.assert_close(packed(x), x @ weight.T, atol=1e-5, rtol=0)


def test_batches_of_nearly_the_same_size_are_one_to_onednn():
    """It compiles a product for every number of rows that it meets."""
    few, near, far = range(FEW_TOKENS + 1), range(FEW_TOKENS + 1, NEAR_TOKENS + 1), range(NEAR_TOKENS + 1, 4097)
    assert [padded_tokens(tokens) for tokens in few] == list(few)
    for tokens in (*near, *far):
        assert 0 <= padded_tokens(tokens) - tokens < tokens / 4
    assert len({padded_tokens(tokens) for tokens in near}) <= 24
    assert len({padded_tokens(tokens) for tokens in far}) <= 124
