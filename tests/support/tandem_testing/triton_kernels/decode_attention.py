"""Decode attention: against float64, alone and in company, and compiled for the shapes of real models."""

from dataclasses import replace

import torch

from tandem_engine.kernels.triton.decode_attention import (
    combine_kernel,
    combine_warps,
    decode_block_m,
    decode_constants,
    decode_tiling,
    split_kernel,
)
from tandem_engine.kernels.triton.work_list import ALL, CHUNKS, WINDOW, Splitting, splitting_of
from tandem_testing.triton_kernels.ahead_of_time import (
    BEFORE_3_7,
    FLOAT8_COPY,
    MAX_COPY,
    SHARED_LIMIT,
    compile_kernel,
)
from tandem_testing.triton_kernels.attention_cases import Case, Heads
from tandem_testing.triton_kernels.checks import AMPERE, HOPPER

DECODES = ((1, 1), (1, 16), (1, 17), (1, 255), (1, 257), (1, 700))
"""Around the ends of pages and splits."""
FINE = Splitting(group=2, max_queries=1, min_split=32, max_splits=4, block_m=32)
"""Many splits of few tokens."""


def check_every_page_size_and_head_size(device: str) -> None:
    for page_size, head_dim in ((1, 16), (16, 80), (48, 96), (64, 128), (16, 256)):
        heads = Heads(page_size=page_size, head_dim=head_dim)
        Case.make(heads, ((1, 17), (1, 257)), device).check(heads.spec())


def check_every_sharing_of_kv_heads(device: str) -> None:
    for num_heads, kv_heads in ((2, 2), (8, 1), (7, 1), (40, 2)):
        heads = Heads(heads=num_heads, kv_heads=kv_heads)
        Case.make(heads, ((1, 17), (1, 257)), device).check(heads.spec())


def check_windows_and_caps(device: str) -> None:
    """What lies before the window is not even read."""
    heads = Heads()
    for window, soft_cap in ((1, None), (20, None), (300, 2.0), (5000, None), (None, 2.0)):
        spec = heads.spec(window=window, soft_cap=soft_cap)
        case = Case.make(heads, DECODES, device)
        if window is not None:
            for row, (_, seq_len) in enumerate(case.lens):
                gone = case.rows.page_table[row, : max(0, seq_len - window) // heads.page_size].long()
                case.keys[gone], case.values[gone] = torch.nan, torch.nan
        expected = Case.make(heads, DECODES, device).expected(spec)
        torch.testing.assert_close(case.attend(spec).double(), expected, rtol=0, atol=3e-6)


def check_chunks(device: str) -> None:
    """What lies in earlier chunks is not even read. The queries of a row may lie in two of them."""
    heads = Heads()
    for chunk, soft_cap in ((1, None), (20, None), (256, 2.0), (5000, None)):
        spec = heads.spec(chunk=chunk, soft_cap=soft_cap)
        case = Case.make(heads, DECODES, device)
        for row, (_, seq_len) in enumerate(case.lens):
            gone = case.rows.page_table[row, : (seq_len - 1) // chunk * chunk // heads.page_size].long()
            case.keys[gone], case.values[gone] = torch.nan, torch.nan
        expected = Case.make(heads, DECODES, device).expected(spec)
        torch.testing.assert_close(case.attend(spec).double(), expected, rtol=0, atol=3e-6)


def check_queries_of_a_row_in_two_chunks(device: str) -> None:
    """The second sees nothing of the first 33 splits, more than are combined at once."""
    fine = Splitting(group=2, max_queries=2, min_split=8, max_splits=64, block_m=32)
    heads = Heads()
    for sinks, lens in ((None, ((2, 481), (2, 480))), (heads.sinks(device), ((2, 481), (1, 481)))):
        Case.make(heads, lens, device).check(heads.spec(chunk=480, sinks=sinks), splitting=fine)


def check_half_precision(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        heads = Heads(dtype=dtype, head_dim=128)
        Case.make(heads, DECODES, device).check(heads.spec())


def check_many_splits_are_one(device: str) -> None:
    """Whole splits, one token more, and so many tokens that splits are longer than the shortest."""
    heads = Heads()
    lens = [(1, seq_len) for seq_len in (31, 32, 33, 64, 96, 97, 128, 385)]
    Case.make(heads, lens, device).check(heads.spec(), splitting=FINE)
    Case.make(heads, lens, device).check(heads.spec(window=70), splitting=FINE)


def check_company_and_programs_change_no_bit(device: str) -> None:
    heads = Heads()
    for spec in (heads.spec(), heads.spec(window=40)):
        case = Case.make(heads, DECODES[2:5], device)
        together = case.attend(spec, splitting=FINE)
        assert torch.equal(case.attend(spec, splitting=FINE, multiprocessors=1), together)
        for row in range(len(case.lens)):
            assert torch.equal(case.only(row).attend(spec, splitting=FINE), together[row : row + 1]), case.lens[row]


def check_several_queries_see_up_to_themselves(device: str) -> None:
    """Rows of 1, 2 and 3 queries in one tile, the first of them without a prefix."""
    heads = Heads(heads=8)
    lens = ((2, 2), (3, 40), (1, 33), (2, 600), (3, 257))
    for spec in (heads.spec(), heads.spec(window=30)):
        Case.make(heads, lens, device).check(spec, max_queries=3)


def check_a_row_of_no_tokens_gets_zeros(device: str) -> None:
    """It is the padding of a CUDA graph [finite-padding]."""
    heads = Heads()
    case = Case.make(heads, ((1, 40), (1, 0), (1, 0)), device)
    out = case.attend(heads.spec())
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    case.check(heads.spec())


def check_nan_of_a_sequence_stays_its_own(device: str) -> None:
    heads = Heads()
    case = Case.make(heads, ((1, 300), (1, 40)), device)
    case.keys[case.rows.page_table[0, 3].long()] = torch.nan
    for spec in (heads.spec(), heads.spec(soft_cap=2.0)):
        out = case.attend(spec)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


def check_sinks_count_once_in_any_number_of_splits(device: str) -> None:
    heads = Heads(heads=8)
    lens = ((1, 1), (1, 31), (1, 33), (1, 128), (1, 385))
    fine = replace(FINE, group=4)
    for window, soft_cap in ((None, None), (70, None), (None, 2.0)):
        spec = heads.spec(window=window, soft_cap=soft_cap, sinks=heads.sinks(device))
        Case.make(heads, lens, device).check(spec, splitting=fine)
    Case.make(heads, ((2, 2), (3, 40), (1, 600)), device).check(heads.spec(sinks=heads.sinks(device)), max_queries=3)


def check_rows_of_no_tokens_get_zeros_with_sinks(device: str) -> None:
    heads = Heads()
    out = Case.make(heads, ((1, 40), (1, 0)), device).attend(heads.spec(sinks=heads.sinks(device)))
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def check_float8_pages_with_a_scale_for_each_head(device: str) -> None:
    heads = Heads(dtype=torch.bfloat16)
    case = Case.make(heads, DECODES[2:5], device)
    scales = torch.tensor([0.5, 2.0], device=device), torch.tensor([4.0, 0.25], device=device)
    for kind in (torch.float8_e5m2, torch.float8_e4m3fn):
        small = case.converted(kind)
        expected = small.converted(torch.float32, scales=scales).expected(heads.spec())
        out = small.attend(heads.spec(), scales=scales).double()
        torch.testing.assert_close(out, expected, rtol=0, atol=4e-2)


def compile_for_llama_8b(arch: int) -> None:
    decode_fits(32, 8, 128, arch=arch)


def compile_for_verification_of_drafts() -> None:
    decode_fits(32, 8, 128, arch=HOPPER, max_queries=5)


def compile_for_gemma(arch: int) -> None:
    """Heads of 256, a window and a cap."""
    decode_fits(8, 4, 256, arch=arch, span=WINDOW, capped=True)


def compile_for_gemma4(arch: int) -> None:
    """Layers without a window have heads of 512."""
    decode_fits(8, 2, 512, arch=arch)


def compile_for_llama4(arch: int) -> None:
    """Layers with chunks."""
    decode_fits(40, 8, 128, arch=arch, span=CHUNKS)


def compile_for_sinks(arch: int) -> None:
    """Layers of gpt-oss, with the window and without."""
    for span in (WINDOW, ALL):
        decode_fits(64, 8, 64, arch=arch, span=span, sinks=True)


def compile_for_float32_and_padded_heads() -> None:
    decode_fits(4, 2, 80, arch=HOPPER, kind="fp32")


def compile_for_float8_pages() -> None:
    decode_fits(32, 8, 128, arch=HOPPER, pool_kind="fp8e4nv")
    decode_fits(64, 8, 64, arch=HOPPER, pool_kind="fp8e4nv", sinks=True)
    if not BEFORE_3_7:
        decode_fits(32, 8, 128, arch=AMPERE, pool_kind="fp8e5")


def decode_fits(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    arch: int,
    kind: str = "bf16",
    pool_kind: str | None = None,
    page_size: int = 16,
    span: int = ALL,
    capped: bool = False,
    sinks: bool = False,
    max_queries: int = 1,
) -> None:
    """Both kernels fit the device, and the first of them reads pages while it computes."""
    itemsize = 4 if kind == "fp32" else 2
    pool_itemsize = 1 if pool_kind else itemsize
    splitting = splitting_of(num_heads=heads, kv_heads=kv_heads, max_queries=max_queries, block_m=128)
    constants = decode_constants(splitting, kv_heads, head_dim, span=span)
    tiling = decode_tiling(
        head_dim,
        itemsize,
        SHARED_LIMIT[arch],
        pool_itemsize=pool_itemsize,
        block_m=decode_block_m(splitting),
    )
    scale = "*fp32:16" if pool_kind else None
    scales = {"k_scale": scale, "v_scale": scale}
    lens = {"extend_lens": "*i32", "seq_lens": "*i32", "starts": "*i32:16"}
    partials = {"partial": "*fp32:16", "partial_stats": "*fp32:16", "out": f"*{kind}:16", "span": "i32"}
    split = compile_kernel(
        split_kernel,
        {
            "q": f"*{kind}:16",
            **dict.fromkeys(("keys", "values"), f"*{pool_kind or kind}:16"),
            "page_table": "*i32",
            **dict.fromkeys(("items", "totals"), "*i32:16"),
            **dict.fromkeys(("scale", "cap"), "fp32"),
            **dict.fromkeys(("token_stride", "page_stride"), "i32:16"),
            "table_stride": "i32",
            **lens,
            **partials,
            **(scales if pool_kind else {}),
            **({"sinks": "*fp32:16"} if sinks else {}),
        },
        {
            **({} if sinks else {"sinks": None}),
            **({} if pool_kind else scales),
            "PAGE_SIZE": page_size,
            "CAPPED": capped,
            "BLOCK_M": decode_block_m(splitting),
            "BLOCK_N": tiling.block_n,
            **constants,
        },
        arch=arch,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.most_registers,
    )
    split.assert_fits()
    split.assert_pipelined(buffers=tiling.num_stages - 1)
    split.assert_wide_copies(at_least=FLOAT8_COPY if pool_kind else MAX_COPY)
    # An older Triton needs more registers for chunks.
    least = tiling.resident - (1 if span == CHUNKS and BEFORE_3_7 else 0)
    assert split.resident() >= least, f"{split.what}: {split.resident()} run at once, not {least}"
    if pool_kind:
        assert "F2F" not in split.instructions(), f"{split.what} converts numbers one by one"
    compile_kernel(
        combine_kernel,
        {**lens, **partials, "first_items": "*i32:16"},
        constants,
        arch=arch,
        num_warps=combine_warps(constants),
    ).assert_fits()
