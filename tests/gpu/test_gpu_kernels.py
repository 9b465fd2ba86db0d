"""Kernels on a real device: the checks that run without one, and the same comparisons in the shapes of real models.

Qwen3-0.6B: hidden 1024, 16 heads and 8 of K and V of 128, inner 3072, vocabulary 151936, norms of heads.
Llama-3.1-8B: hidden 4096, 32 heads and 8 of K and V of 128, inner 14336, vocabulary 128256.
Qwen3-30B-A3B: hidden 2048, 128 experts of 768, 8 for a token.
"""

import pytest
import torch

from tandem_engine.config import NormKind
from tandem_testing.triton_kernels.checks import KernelChecks

SUITES = [
    KernelChecks(f"tandem_testing.triton_kernels.{name}_kernels")
    for name in ("layer", "expert", "sampling", "table", "quantized", "quantized_expert", "gpt_oss")
]
CHECKS = [pytest.param(suite, check, id=check) for suite in SUITES for check in suite.on_device]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("suite", "check"), CHECKS)
def test_checks_on_a_device(suite, check):
    suite.passes_on("cuda", check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1024, 4096])
@pytest.mark.parametrize("tokens", [1, 8192])
def test_norms_of_real_models(tokens, hidden, dtype):
    from tandem_testing.triton_kernels import layer_kernels

    for kind in NormKind:
        layer_kernels.norm_agrees("cuda", dtype, kind, tokens=tokens, size=hidden)
    layer_kernels.head_norm_agrees("cuda", dtype, NormKind.PLAIN, tokens=tokens, heads=24, size=128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "kind"), [(16, NormKind.PLAIN), (32, None)], ids=["qwen3", "llama"])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_rotation_and_store_of_real_models(tokens, query, kind, dtype):
    from tandem_testing.triton_kernels import layer_kernels

    heads = layer_kernels.Heads(tokens=tokens, query=query, kv=8, size=128, rotary=128, page=16)
    layer_kernels.rotation_agrees("cuda", dtype, heads, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [3072, 14336])
def test_activations_of_real_models(inner, dtype):
    from tandem_testing.triton_kernels import layer_kernels

    for name in ("silu", "gelu_tanh"):
        layer_kernels.activation_agrees("cuda", dtype, name, tokens=1024, size=inner)


@pytest.mark.parametrize("tokens", [1, 300])
def test_experts_of_a_real_model(tokens):
    from tandem_testing.triton_kernels import expert_kernels

    expert_kernels.experts_agree(
        "cuda", torch.bfloat16, "silu", tokens=tokens, hidden=2048, inner=768, experts=128, chosen=8
    )


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize(("coding", "group_size"), [("int4", 128), ("int8", 14336), ("float8", 128)])
def test_products_by_quantized_weights_of_a_real_model(coding, group_size, tokens):
    from tandem_testing.triton_kernels import quantized_kernels

    levels = quantized_kernels.random_levels(coding, 4096, 14336, group_size, symmetric=False)
    quantized_kernels.product_agrees("cuda", torch.bfloat16, levels, tokens=tokens)


@pytest.mark.parametrize("coding", ["int4", "int8", "float8"])
def test_quantized_linear_is_batch_invariant_bitwise(coding):
    """Tiles of 16 and of 64 tokens are multiplied by instructions of different width."""
    from tandem_engine.kernels.triton.quantized_gemm import quantized_linear
    from tandem_testing.triton_kernels import quantized_kernels

    weight = quantized_kernels.packed(quantized_kernels.random_levels(coding, 1024, 4096, 128, symmetric=False), "cuda")
    x = torch.randn((300, 4096), device="cuda").bfloat16()
    together = quantized_linear(x, weight)
    for tokens in (1, 16, 40):
        assert torch.equal(quantized_linear(x[:tokens], weight), together[:tokens]), tokens


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("coding", ["int4", "int8", "float8"])
def test_packed_experts_of_a_real_model(coding, tokens):
    from tandem_testing.triton_kernels import quantized_expert_kernels

    gate_up, down = packed_experts_of_a_real_model(coding)
    quantized_expert_kernels.agrees("cuda", torch.bfloat16, gate_up, down, tokens=tokens, chosen=8)


@pytest.mark.parametrize("coding", ["int4", "int8", "float8"])
def test_packed_experts_are_batch_invariant_bitwise(coding):
    """Blocks of 16 and of 64 pairs are multiplied by instructions of different width."""
    from tandem_testing.triton_kernels import quantized_expert_kernels as checks

    stacks = checks.stacks_of(*packed_experts_of_a_real_model(coding), "cuda")
    x = torch.randn((300, 2048), device="cuda").bfloat16()
    choice = checks.choice_of(300, torch.bfloat16, "cuda", count=16, chosen=8)
    together = checks.computed(x, choice, stacks)
    for tokens in (1, 16, 40):
        alone = checks.computed(x[:tokens], type(choice)(*(part[:tokens] for part in choice)), stacks)
        assert torch.equal(alone, together[:tokens]), tokens


def packed_experts_of_a_real_model(coding):
    """16 of its 128."""
    from tandem_testing.triton_kernels.quantized_expert_kernels import levels_of_experts

    return (
        levels_of_experts(coding, 2 * 768, 2048, 128, symmetric=False, count=16),
        levels_of_experts(coding, 2048, 768, 128, symmetric=False, seed=2, count=16),
    )


@pytest.mark.parametrize("vocab", [151_936, 128_256])
def test_penalties_and_tokens_of_real_vocabularies(vocab):
    from tandem_testing.triton_kernels import sampling_kernels

    sampling_kernels.penalties_agree("cuda", rows=16, vocab=vocab)
    sampling_kernels.sampling_agrees("cuda", vocab=vocab, repeats=4)
