"""Attention kernels on a real device: all checks of the interpreter, real shapes, graphs, and no wait for the host."""

from dataclasses import replace

import pytest
import torch

from tandem_engine.forward.prompt_shape import PromptShape, as_prompt
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_testing.forward_builders import PageDealer, make_batch
from tandem_testing.triton_kernels.checks import KernelChecks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODULES = (
    "delta_runs",
    "delta_step",
    "latent_attention",
    "triton_backend",
    "work_list",
    "decode_attention",
    "extend_attention",
)
CHECKS = [
    (KernelChecks(f"tandem_testing.triton_kernels.{name}"), check)
    for name in MODULES
    for check in KernelChecks(f"tandem_testing.triton_kernels.{name}").on_device
]
QWEN3_0_6B, LLAMA_8B = {"heads": 16, "kv_heads": 8, "head_dim": 128}, {"heads": 32, "kv_heads": 8, "head_dim": 128}
MODELS = pytest.mark.parametrize("shape", [QWEN3_0_6B, LLAMA_8B], ids=["Qwen3-0.6B", "Llama-3.1-8B"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.parametrize(("checks", "check"), CHECKS, ids=[f"{c.module.rpartition('.')[2]}-{n}" for c, n in CHECKS])
def test_attention_kernels_on_a_device(checks, check):
    checks.passes_on("cuda", check)


@MODELS
@DTYPES
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decodes_of_real_models(shape, dtype, page_size):
    from tandem_testing.triton_kernels.attention_cases import Case, Heads

    heads = Heads(**shape, page_size=page_size, dtype=dtype)
    lens = [(1, seq_len) for seq_len in (1, 777, 4096, 4097, 32_768, *range(1000, 1064))]
    Case.make(heads, lens, "cuda").check(heads.spec(), multiprocessors=132)


@MODELS
@DTYPES
def test_prompts_of_real_models(shape, dtype):
    from tandem_testing.triton_kernels.attention_cases import Case, Heads

    heads = Heads(**shape, dtype=dtype)
    for spec in (heads.spec(), heads.spec(window=1024, soft_cap=30.0)):
        Case.make(heads, ((2000, 2000), (513, 6000), (100, 100), (1, 900)), "cuda").check(spec)


@MODELS
def test_attention_graph_equals_plan_bitwise_without_sync(shape):
    from tandem_engine.model.attention.triton import TritonBackend

    num_heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    pool = KvPool(
        num_pages=3000,
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    pool.data.normal_()
    backend = TritonBackend(pool, num_heads=num_heads, specs=(AttentionSpec(scale=head_dim**-0.5),))
    backend.warm_up()
    rows = 8
    graph_plan = backend.graph_plan(max_rows=rows, max_pages=600)
    q, k, v = (
        torch.randn((rows, n, head_dim), dtype=torch.bfloat16, device="cuda") for n in (num_heads, kv_heads, kv_heads)
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_plan.prepare()
        out = graph_plan(0, q, k, v)
    dealer = PageDealer(pool=pool)
    for lengths in ((1, 5000, 17, 4096), (30,), (400,) * rows):
        batch = make_batch([dealer.decode(length) for length in lengths])
        on_device = batch_on(batch, "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph_plan.load(on_device)
            graph.replay()
            plain = backend.plan(on_device)(0, *(part[: len(lengths)] for part in (q, k, v)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out[: len(lengths)], plain)
        assert not out[len(lengths) :].any()


@MODELS
def test_captured_prompt_graph_gives_the_bits_of_a_plan(shape):
    from tandem_engine.model.attention.triton import TritonBackend

    num_heads, kv_heads, head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    pool = KvPool(
        num_pages=3000,
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=16,
        dtype=torch.bfloat16,
        device="cuda",
    )
    pool.data.normal_()
    backend = TritonBackend(pool, num_heads=num_heads, specs=(AttentionSpec(scale=head_dim**-0.5),))
    backend.warm_up()
    size = PromptShape(tokens=640, rows=9, extends=5)
    graph_plan = backend.prompt_graph_plan(size, max_pages=600)
    q, k, v = (
        torch.randn((size.tokens, n, head_dim), dtype=torch.bfloat16, device="cuda")
        for n in (num_heads, kv_heads, kv_heads)
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_plan.prepare()
        out = graph_plan(0, q, k, v)
    dealer = PageDealer(pool=pool)
    steps = [
        [dealer.seq(5000, 513), dealer.seq(100, 100), dealer.decode(17), dealer.decode(4096)],
        [dealer.seq(16, 16)],
        [dealer.seq(640, 640)],
    ]
    for sequences in steps:
        batch = make_batch(sequences)
        tokens, plain_batch = batch.num_tokens, batch_on(batch, "cuda")
        padded = batch_on(as_prompt(batch, size), "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph_plan.load(padded)
            graph.replay()
            plain = backend.plan(plain_batch)(0, *(part[:tokens] for part in (q, k, v)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out[:tokens], plain)
        assert bool(out.isfinite().all())


def batch_on(batch, device):
    names = ("page_table", "seq_lens", "extend_lens", "out_cache_loc")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})
