"""Extend attention: against float64, alone and in company, and compiled for the shapes of real models."""

import torch

from tandem_engine.kernels.triton.extend_attention import ExtendTiling, extend_constants, extend_kernel, extend_tiling
from tandem_engine.kernels.triton.work_list import ALL, CHUNKS, WINDOW
from tandem_testing.triton_kernels.ahead_of_time import (
    BEFORE_3_7,
    FLOAT8_COPY,
    MAX_COPY,
    SHARED_LIMIT,
    compile_kernel,
)
from tandem_testing.triton_kernels.attention_cases import Case, Heads
from tandem_testing.triton_kernels.checks import AMPERE, HOPPER

EXTENDS = ((2, 2), (40, 40), (7, 50), (70, 200), (16, 129), (33, 33))
"""Whole prompts and chunks behind a prefix; tiles and blocks that are full, and not."""
MIXED = (*EXTENDS[1:4], (1, 1), (1, 40))


def check_every_page_size_and_head_size(device: str) -> None:
    for page_size, head_dim in ((1, 16), (16, 80), (48, 96), (64, 128), (16, 256)):
        heads = Heads(page_size=page_size, head_dim=head_dim)
        Case.make(heads, ((7, 50), (33, 90)), device).check(heads.spec())


def check_every_sharing_of_kv_heads(device: str) -> None:
    for num_heads, kv_heads in ((2, 2), (8, 1), (7, 1), (40, 2)):
        heads = Heads(heads=num_heads, kv_heads=kv_heads)
        Case.make(heads, EXTENDS[:3], device).check(heads.spec())


def check_windows_and_caps(device: str) -> None:
    """What lies before the window of the oldest query is not even read."""
    heads = Heads()
    for window, soft_cap in ((1, None), (20, None), (100, 2.0), (5000, None), (None, 2.0)):
        spec = heads.spec(window=window, soft_cap=soft_cap)
        case = Case.make(heads, EXTENDS[:4], device)
        if window is not None:
            for row, (queries, seq_len) in enumerate(case.lens):
                oldest = max(0, seq_len - queries + 1 - window)
                gone = case.rows.page_table[row, : oldest // heads.page_size].long()
                case.keys[gone], case.values[gone] = torch.nan, torch.nan
        expected = Case.make(heads, EXTENDS[:4], device).expected(spec)
        torch.testing.assert_close(case.attend(spec).double(), expected, rtol=0, atol=3e-6)


def check_chunks(device: str) -> None:
    """Chunks that end within a tile and within a block, and some that a tile does not reach."""
    heads = Heads()
    for chunk, soft_cap in ((1, None), (24, None), (64, 2.0), (128, None), (5000, None)):
        spec = heads.spec(chunk=chunk, soft_cap=soft_cap)
        case = Case.make(heads, EXTENDS[:5], device)
        for row, (queries, seq_len) in enumerate(case.lens):
            gone = case.rows.page_table[row, : (seq_len - queries) // chunk * chunk // heads.page_size].long()
            case.keys[gone], case.values[gone] = torch.nan, torch.nan
        expected = Case.make(heads, EXTENDS[:5], device).expected(spec)
        torch.testing.assert_close(case.attend(spec).double(), expected, rtol=0, atol=3e-6)


def check_half_precision(device: str) -> None:
    """Tiles of the size that tensor cores get."""
    for dtype in (torch.float16, torch.bfloat16):
        heads = Heads(dtype=dtype, head_dim=128)
        Case.make(heads, EXTENDS[1:4], device).check(heads.spec(window=64))


def check_prompts_and_decodes_in_one_batch(device: str) -> None:
    heads = Heads()
    for spec in (heads.spec(), heads.spec(window=25)):
        Case.make(heads, MIXED, device).check(spec)


def check_company_changes_no_bit(device: str) -> None:
    heads = Heads()
    for spec in (heads.spec(), heads.spec(window=25)):
        case = Case.make(heads, MIXED, device)
        together, start = case.attend(spec), 0
        for row, (queries, _) in enumerate(MIXED):
            assert torch.equal(case.only(row).attend(spec), together[start : start + queries]), MIXED[row]
            start += queries


def check_sinks(device: str) -> None:
    heads = Heads(heads=8)
    for window, soft_cap in ((None, None), (25, None), (None, 2.0)):
        spec = heads.spec(window=window, soft_cap=soft_cap, sinks=heads.sinks(device))
        Case.make(heads, MIXED, device).check(spec)


def check_float8_pages_with_a_scale_for_each_head(device: str) -> None:
    heads = Heads(dtype=torch.bfloat16)
    case = Case.make(heads, EXTENDS[2:4], device)
    scales = torch.tensor([0.5, 2.0], device=device), torch.tensor([4.0, 0.25], device=device)
    small = case.converted(torch.float8_e4m3fn)
    expected = small.converted(torch.float32, scales=scales).expected(heads.spec())
    out = small.attend(heads.spec(), scales=scales).double()
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-2)


WARP_GROUP = 64
"""Rows that a warp group of Hopper multiplies at a time."""


def compile_for_llama_8b(arch: int) -> None:
    extend_fits(32, 8, 128, arch=arch)


def compile_for_gemma(arch: int) -> None:
    """Heads of 256, a window and a cap."""
    extend_fits(8, 4, 256, arch=arch, span=WINDOW, capped=True)


def compile_for_gemma4(arch: int) -> None:
    """Layers without a window have heads of 512."""
    extend_fits(8, 2, 512, arch=arch)


def compile_for_llama4(arch: int) -> None:
    """Layers with chunks."""
    extend_fits(40, 8, 128, arch=arch, span=CHUNKS)


def compile_for_sinks(arch: int) -> None:
    """Layers of gpt-oss, with the window and without."""
    for span in (WINDOW, ALL):
        extend_fits(64, 8, 64, arch=arch, span=span, sinks=True)


def compile_for_heads_of_64_and_of_256() -> None:
    """Before Hopper both have tiles of their own."""
    extend_fits(32, 8, 64, arch=AMPERE)
    extend_fits(8, 4, 256, arch=AMPERE)


def compile_for_float32_and_padded_heads() -> None:
    extend_fits(4, 2, 80, arch=HOPPER, kind="fp32")


def compile_for_float8_pages() -> None:
    extend_fits(32, 8, 128, arch=HOPPER, pool_kind="fp8e4nv")
    extend_fits(64, 8, 64, arch=HOPPER, pool_kind="fp8e4nv", sinks=True)
    if not BEFORE_3_7:
        extend_fits(32, 8, 128, arch=AMPERE, pool_kind="fp8e5")


def extend_fits(
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
    tiling: ExtendTiling | None = None,
) -> None:
    """It fits the device, and reads pages while it computes."""
    tiling = tiling or extend_tiling(head_dim, 4 if kind == "fp32" else 2, SHARED_LIMIT[arch])
    scale = "*fp32:16" if pool_kind else None
    scales = {"k_scale": scale, "v_scale": scale}
    compiled = compile_kernel(
        extend_kernel,
        {
            **dict.fromkeys(("q", "out"), f"*{kind}:16"),
            **dict.fromkeys(("keys", "values"), f"*{pool_kind or kind}:16"),
            "page_table": "*i32",
            **dict.fromkeys(("extend_lens", "seq_lens"), "*i32"),
            **dict.fromkeys(("starts", "tile_rows", "tile_numbers", "totals"), "*i32:16"),
            **dict.fromkeys(("scale", "cap"), "fp32"),
            "span": "i32",
            **dict.fromkeys(("token_stride", "page_stride"), "i32:16"),
            "table_stride": "i32",
            **(scales if pool_kind else {}),
            **({"sinks": "*fp32:16"} if sinks else {}),
        },
        {
            **({} if sinks else {"sinks": None}),
            **({} if pool_kind else scales),
            **extend_constants(
                group=heads // kv_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                tiling=tiling,
                span=span,
                capped=capped,
            ),
        },
        arch=arch,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    compiled.assert_fits()
    compiled.assert_pipelined(buffers=tiling.num_stages - 1)
    compiled.assert_wide_copies(at_least=FLOAT8_COPY if pool_kind else MAX_COPY)
    if arch == HOPPER and kind != "fp32" and tiling.block_m >= WARP_GROUP:
        assert "HGMMA" in compiled.instructions(), f"{compiled.what} does not multiply by warp groups"
