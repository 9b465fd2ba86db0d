"""Attention over latents: against float64, alone and in company, and compiled for the shapes of real models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem_engine.kernels.triton.common import facts_of
from tandem_engine.kernels.triton.decode_attention import Partials, combine_kernel, combine_warps, decode_constants
from tandem_engine.kernels.triton.latent_attention import (
    LatentTiling,
    latent_attention,
    latent_constants,
    latent_extend_kernel,
    latent_split_kernel,
    latent_splitting,
    latent_tilings,
    split_constants,
)
from tandem_engine.kernels.triton.work_list import ALL, Bounds, Rows, Splitting, WorkList
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.reference import attend_dense
from tandem_testing.triton_kernels.ahead_of_time import SHARED_LIMIT, compile_kernel
from tandem_testing.triton_kernels.attention_cases import DEVICE_TOLERANCE, TOLERANCE
from tandem_testing.triton_kernels.checks import AMPERE, HOPPER

RANK, TURNED = 512, 64
"""Of DeepSeek, Kimi and GLM."""
FINE = Splitting(group=6, max_queries=1, min_split=32, max_splits=4, block_m=64)
"""Many splits of few tokens."""
STEP = ((1, 1), (1, 33), (20, 20), (1, 290), (7, 90))
"""Decodes and prompts, with and without a prefix."""


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Of a model, and how the pool holds them."""

    heads: int = 6
    rank: int = 24
    turned: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return self.rank + self.turned

    @property
    def scale(self) -> float:
        return self.width**-0.5


@dataclass(frozen=True, kw_only=True)
class LatentCase:
    """One layer's attention of one batch. What no row may read is NaN."""

    shape: Latents
    q: Tensor
    pages: Tensor
    """[pages, 1, page_size, width], the second of two layers."""
    rows: Rows
    lens: tuple[tuple[int, int], ...]
    """(queries, tokens) of each row."""

    @classmethod
    def make(cls, shape: Latents, lens: Sequence[tuple[int, int]], device: str, *, seed: int = 0) -> "LatentCase":
        """Random queries and latents for rows of (queries, tokens), in pages dealt out in a scrambled order."""
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-seq_len // shape.page_size) for _, seq_len in lens]
        order = torch.randperm(sum(counts) + 1, generator=generator) + 1
        table = torch.zeros((len(lens), max(1, *counts)), dtype=torch.int32)
        pool = torch.full((sum(counts) + 2, 2, 1, shape.page_size, shape.width), torch.nan, dtype=shape.dtype)
        pool[0] = 0
        for row, ((_, seq_len), count) in enumerate(zip(lens, counts, strict=True)):
            pages, order = order[:count], order[count:]
            table[row, :count] = pages
            slots = torch.arange(seq_len)
            latents = torch.randn((seq_len, shape.width), generator=generator).to(shape.dtype)
            pool[pages[slots // shape.page_size], 1, 0, slots % shape.page_size] = latents
        tokens = sum(queries for queries, _ in lens)
        q = torch.randn((tokens, shape.heads, shape.width), generator=generator).to(shape.dtype)
        columns = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in zip(*lens, strict=True))
        return cls(
            shape=shape,
            q=q.to(device),
            pages=pool.to(device)[:, 1],
            rows=Rows(table.to(device), *columns),
            lens=tuple(lens),
        )

    def only(self, row: int) -> "LatentCase":
        """That row without its company."""
        start = sum(queries for queries, _ in self.lens[:row])
        part = slice(row, row + 1)
        return replace(
            self,
            q=self.q[start : start + self.lens[row][0]],
            rows=Rows(*(column[part] for column in self.rows)),
            lens=self.lens[part],
        )

    def expected(self) -> Tensor:
        """[T, heads, rank] float64"""
        parts, start, shape = [], 0, self.shape
        for row, (queries, seq_len) in enumerate(self.lens):
            slots = torch.arange(seq_len, device=self.q.device)
            pages = self.rows.page_table[row].long()[slots // shape.page_size]
            keys = self.pages[pages, :, slots % shape.page_size].double()
            q = self.q[start : start + queries].double()
            spec = AttentionSpec(scale=shape.scale)
            values = keys[..., : shape.rank]
            parts.append(
                attend_dense(q, keys, values, seq_len - queries, spec)
                if seq_len
                else torch.zeros_like(q[..., : shape.rank])
            )
            start += queries
        return torch.cat(parts)

    def attend(self, *, max_queries: int = 1, splitting: Splitting | None = None, multiprocessors: int = 3) -> Tensor:
        """What the kernels make of it."""
        shape, device = self.shape, self.q.device
        decode, extend = latent_tilings(
            shape.heads, shape.dtype.itemsize, facts_of(device).shared_bytes, width=shape.width
        )
        splitting = splitting or latent_splitting(heads=shape.heads, max_queries=max_queries, block_m=extend.block_m)
        splitting = replace(splitting, block_m=extend.block_m)
        bounds = Bounds(len(self.lens), self.rows.page_table.shape[1] * shape.page_size, len(self.q))
        work = WorkList.empty(splitting, bounds, span=None, device=device)
        work.fill(self.rows)
        partials = Partials.empty(splitting, bounds, kv_heads=1, head_dim=shape.rank, device=device)
        out = torch.full((*self.q.shape[:2], shape.rank), torch.nan, dtype=self.q.dtype, device=device)
        latent_attention(
            self.q, self.pages, out, self.rows, work, partials, scale=shape.scale,
            decode=decode, extend=extend, multiprocessors=multiprocessors,
        )  # fmt: skip
        return out

    def check(self, **how: object) -> None:
        """The kernels give what float64 does."""
        bounds = DEVICE_TOLERANCE if self.q.device.type == "cuda" else TOLERANCE
        found = self.attend(**how).double()
        torch.testing.assert_close(found, self.expected(), rtol=0, atol=bounds[self.shape.dtype])


def check_every_page_size_and_latent(device: str) -> None:
    for page_size, rank, turned in ((1, 24, 16), (16, 16, 4), (48, 80, 24), (64, 128, 32), (16, RANK, TURNED)):
        shape = Latents(page_size=page_size, rank=rank, turned=turned)
        LatentCase.make(shape, ((1, 17), (1, 257), (5, 40)), device).check()


def check_every_number_of_heads(device: str) -> None:
    """Less than a tile of columns, one, and several, the last of which is not full."""
    lens = ((1, 33), (7, 40))
    for heads in (1, 16, 20, 64, 80):
        LatentCase.make(Latents(heads=heads), lens, device).check()
    for heads in (20, 80):
        LatentCase.make(Latents(heads=heads, dtype=torch.bfloat16), lens, device).check()


def check_half_precision(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        LatentCase.make(Latents(heads=16, rank=RANK, turned=TURNED, dtype=dtype), STEP, device).check()


def check_many_splits_are_one(device: str) -> None:
    """Whole splits, one token more, and so many tokens that splits are longer than the shortest."""
    lens = [(1, seq_len) for seq_len in (31, 32, 33, 64, 96, 97, 128, 129, 385)]
    LatentCase.make(Latents(), lens, device).check(splitting=FINE)


def check_company_and_programs_change_no_bit(device: str) -> None:
    case = LatentCase.make(Latents(), STEP, device)
    together = case.attend(splitting=FINE)
    assert torch.equal(case.attend(splitting=FINE, multiprocessors=1), together)
    start = 0
    for row, (queries, _) in enumerate(case.lens):
        alone = case.only(row).attend(splitting=FINE)
        assert torch.equal(alone, together[start : start + queries]), case.lens[row]
        start += queries


def check_several_queries_see_up_to_themselves(device: str) -> None:
    """Rows of 1, 2 and 3 queries as decodes, the first of them without a prefix."""
    lens = ((2, 2), (3, 40), (1, 33), (2, 600), (3, 257))
    LatentCase.make(Latents(), lens, device).check(max_queries=3)
    LatentCase.make(Latents(), lens, device).check(splitting=replace(FINE, max_queries=3))


def check_a_row_of_no_tokens_gets_zeros(device: str) -> None:
    """It is the padding of a CUDA graph [finite-padding]."""
    case = LatentCase.make(Latents(), ((1, 40), (1, 0), (1, 0)), device)
    out = case.attend()
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    case.check()


def check_nan_of_a_sequence_stays_its_own(device: str) -> None:
    case = LatentCase.make(Latents(), ((1, 300), (1, 40), (9, 50)), device)
    case.pages[case.rows.page_table[0, 3].long()] = torch.nan
    out = case.attend()
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def compile_for_heads_of_one_rank() -> None:
    """DeepSeek V2 Lite, or a rank of eight of V3; GLM-4.7-Flash."""
    latents_fit(16, arch=HOPPER, page_size=16)
    latents_fit(20, arch=HOPPER)


def compile_for_deepseek_v3_and_kimi() -> None:
    latents_fit(64, arch=HOPPER)
    latents_fit(128, arch=HOPPER, page_size=16)


def compile_for_ampere_and_float32() -> None:
    latents_fit(128, arch=AMPERE)
    latents_fit(16, arch=HOPPER, kind="fp32")


def latents_fit(heads: int, *, arch: int, kind: str = "bf16", page_size: int = 64) -> None:
    """All kernels fit the device, and on Hopper those over latents read pages while they compute."""
    itemsize = 4 if kind == "fp32" else 2
    decode, extend = latent_tilings(heads, itemsize, SHARED_LIMIT[arch], width=RANK + TURNED)
    splitting = latent_splitting(heads=heads, max_queries=1, block_m=extend.block_m)
    pages = torch.empty(1, 1, page_size, RANK + TURNED, device="meta")
    common = {
        **dict.fromkeys(("q", "latents", "out"), f"*{kind}:16"),
        **dict.fromkeys(("page_table", "extend_lens", "seq_lens"), "*i32"),
        **dict.fromkeys(("starts", "totals"), "*i32:16"),
        "page_stride": "i32:16",
        "table_stride": "i32",
        "scale": "fp32",
    }
    partials = dict.fromkeys(("partial", "partial_stats"), "*fp32:16")

    def fits(kernel: object, tiling: LatentTiling, signature: dict[str, str], constants: dict[str, int]) -> None:
        built = compile_kernel(
            kernel,
            common | signature,
            constants | latent_constants(pages, heads=heads, rank=RANK, tiling=tiling),
            arch=arch,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        built.assert_fits()
        if tiling is decode:
            assert built.resident() >= tiling.resident, f"{built.what}: {built.resident()} run at once"
        if arch == HOPPER and kind != "fp32":
            built.assert_pipelined(buffers=tiling.num_stages - 1)
            built.assert_wide_copies()
            assert "HGMMA" in built.instructions(), f"{built.what} does not multiply from shared memory"

    fits(latent_split_kernel, decode, {"items": "*i32:16", **partials}, split_constants(splitting))
    fits(latent_extend_kernel, extend, dict.fromkeys(("tile_rows", "tile_numbers"), "*i32:16"), {})
    constants = decode_constants(splitting, 1, RANK, span=ALL)
    compile_kernel(
        combine_kernel,
        {
            **partials,
            **dict.fromkeys(("extend_lens", "seq_lens"), "*i32"),
            **dict.fromkeys(("starts", "first_items"), "*i32:16"),
            "out": f"*{kind}:16",
            "span": "i32",
        },
        constants,
        arch=arch,
        num_warps=combine_warps(constants),
    ).assert_fits()
