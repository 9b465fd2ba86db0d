"""Attention of long prompts by libraries: what each supports, as data, and how it is called.

A library computes one row of a step: its queries over K and V of its sequence, gathered from pages into dense memory.
That is a copy of what the row reads, against arithmetic that grows with it times the queries: 1 to 2 % of a prompt of
8,192 tokens. So no library has to know pages, and each result follows from its row alone.

    name             what                                                         prefixes   windows   caps
    torch_sdpa       scaled_dot_product_attention by cuDNN, else FlashAttention   -          -         -
    flash_attn       torch's varlen_attn; by FlashAttention-3, which is           yes        yes       -
                     registered with torch, where flash_attn_interface is
                     installed and the GPU is a Hopper
    flashinfer       single_prefill_with_kv_cache, where it is installed          yes        yes       yes
    flex_attention   torch's, compiled at the start                               yes        yes       yes

None takes float32, which is exact here; float8 pages, latents, chunks and sinks are the kernels' of this repository
(`triton_attn`). Nothing is imported before a candidate is tried.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tandem_engine.model.attention.backend import AttentionSpec

OURS = "triton_attn"
AUTO = "auto"

HOPPER = (9, 0)


class DenseAttend(Protocol):
    """Causal attention of one row."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """q [T, heads, head_dim], whose heads are dense, over keys and values [kv_heads, S, head_dim], to q's shape.

        The last query sees the last token of S, the one before sees up to the one before, and so on.
        """
        ...


class AttentionFacts(NamedTuple):
    """What attention of a model is, on which device."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of queries."""
    pool_dtype: torch.dtype
    """Of pages."""
    page_size: int
    device: torch.device
    latents: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability; (0, 0) of a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Supports:
    """What a library takes."""

    prefix: bool = True
    """Rows behind cached tokens: fewer queries than keys."""
    window: bool = False
    soft_cap: bool = False
    head_dims: tuple[int, int] = (256, 8)
    """At most, and a multiple of."""
    capability: tuple[int, int] = (8, 0)
    cpu: bool = False
    """Runs on a CPU, for tests."""
    module: str = ""
    """That has to be installed; "" where torch has it."""

    def refusal(self, facts: AttentionFacts, spec: AttentionSpec) -> str:
        """Why layers of `spec` are not for this library, one clause; "" if they are."""
        most, multiple = self.head_dims
        needed = ".".join(map(str, self.capability))
        on_cpu = facts.device.type == "cpu"
        checks = (
            (facts.dtype is torch.float32, "float32 is computed exactly, by kernels of its own"),
            (facts.latents, "the model stores latents"),
            (facts.pool_dtype != facts.dtype, f"pages are {str(facts.pool_dtype).removeprefix('torch.')}"),
            (spec.sinks is not None, "layers have sinks"),
            (spec.chunk is not None, "layers see chunks"),
            (spec.window is not None and not self.window, "layers have a window"),
            (spec.soft_cap is not None and not self.soft_cap, "scores are capped"),
            (facts.head_dim > most or facts.head_dim % multiple > 0, f"heads have {facts.head_dim} numbers"),
            (on_cpu and not self.cpu, "it needs a GPU"),
            (not on_cpu and facts.capability < self.capability, f"it needs compute capability {needed}"),
            (bool(self.module) and not _installed(self.module), f"{self.module} is not installed"),
        )
        return next((reason for refused, reason in checks if refused), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A candidate."""

    name: str
    supports: Supports
    load: Callable[[AttentionFacts], DenseAttend]
    """Imports it. Raises whatever importing raises."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions decide how fast it is, besides torch's."""


def _installed(module: str) -> bool:
    return util.find_spec(module) is not None


def version_of(package: str) -> str:
    """ "" without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def load_sdpa(facts: AttentionFacts) -> DenseAttend:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    # Never by a matrix of all scores on a device: that of a long prompt does not fit.
    on_gpu = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    order = on_gpu if facts.device.type == "cuda" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    grouped = facts.heads != facts.kv_heads

    def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        with sdpa_kernel(order, set_priority=True):
            out = scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=spec.scale, enable_gqa=grouped
            )
        return out[0].transpose(0, 1)

    return attend


def load_flash(facts: AttentionFacts) -> DenseAttend:
    from torch.nn import attention
    from torch.nn.attention.varlen import varlen_attn

    # It logs a line for each call.
    logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)
    if facts.capability[:1] == HOPPER[:1] and _installed("flash_attn_interface"):
        attention.activate_flash_attention_impl("FA3")
    # Parameters differ between versions of torch: older ones share heads without a parameter, have no splits to switch
    # off, and the oldest have no windows.
    known = inspect.signature(varlen_attn).parameters
    further = {name: value for name, value in (("enable_gqa", True), ("num_splits", 1)) if name in known}
    compute: Callable[..., Any] = varlen_attn

    def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        queries, tokens = len(q), keys.shape[1]
        masked: dict[str, Any] = {"window_size": (_left(spec), 0)}
        if "window_size" not in known:
            if spec.window is not None:
                raise NotImplementedError("varlen_attn of this torch has no windows")
            masked = {"is_causal": True}
        # Made on the device: a copy from the host could wait for it.
        starts = [torch.arange(0, n + 1, n, dtype=torch.int32, device=q.device) for n in (queries, tokens)]
        out: Tensor = compute(
            q, keys.transpose(0, 1), values.transpose(0, 1), *starts, queries, tokens,
            scale=spec.scale, **masked, **further,
        )  # fmt: skip
        return out

    return attend


def load_flashinfer(_facts: AttentionFacts) -> DenseAttend:
    compute: Callable[..., Tensor] = import_module("flashinfer").single_prefill_with_kv_cache

    def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        return compute(
            q.contiguous(), keys.contiguous(), values.contiguous(), causal=True, kv_layout="HND",
            sm_scale=spec.scale, window_left=_left(spec), logits_soft_cap=spec.soft_cap,
        )  # fmt: skip

    return attend


def load_flex(facts: AttentionFacts) -> DenseAttend:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    on_gpu = facts.device.type == "cuda"
    compute: Callable[..., Tensor] = flex_attention
    if on_gpu:
        compute = torch.compile(flex_attention, dynamic=True)
    grouped = facts.heads != facts.kv_heads

    def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        queries, tokens = len(q), keys.shape[1]
        # A tensor, so that what is compiled holds for any prefix.
        before = torch.full((), tokens - queries, dtype=torch.int64, device=q.device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = query + before >= key
            return seen if spec.window is None else seen & (query + before - key < spec.window)

        def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
            assert spec.soft_cap is not None
            return spec.soft_cap * torch.tanh(score / spec.soft_cap)

        # `create_block_mask` makes a number of each query and key: gigabytes of a long prefix.
        partial, full = (_ordered(blocks) for blocks in seen_blocks(queries, tokens, spec.window, q.device))
        mask = BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(queries, tokens), compute_q_blocks=False
        )
        out = compute(
            q.transpose(0, 1)[None], keys[None], values[None], block_mask=mask, scale=spec.scale, enable_gqa=grouped,
            score_mod=None if spec.soft_cap is None else capped,
        )  # fmt: skip
        return out[0].transpose(0, 1)

    return attend


FLEX_BLOCK = 128
"""Queries, and keys, that FlexAttention looks up together."""


def seen_blocks(queries: int, tokens: int, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which blocks of keys the blocks of queries see in part, and which wholly: bool [blocks of queries, of keys]."""
    first = torch.arange(0, queries, FLEX_BLOCK, device=device)[:, None] + (tokens - queries)
    key = torch.arange(0, tokens, FLEX_BLOCK, device=device)
    last, last_key = first + FLEX_BLOCK - 1, key + FLEX_BLOCK - 1
    some, full = key <= last, last_key <= first
    if window is not None:
        some &= first - last_key < window
        full &= last - key < window
    return some & ~full, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are true, and which, those first: int32, as a `BlockMask` has them."""
    counts = blocks.sum(1, dtype=torch.int32)
    return counts[None, None], blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None]


def _left(spec: AttentionSpec) -> int:
    """Tokens before its own that a query sees, as libraries count them; -1 is all."""
    return -1 if spec.window is None else spec.window - 1


LIBRARIES = (
    Library(name="torch_sdpa", supports=Supports(prefix=False, cpu=True), load=load_sdpa),
    Library(
        name="flash_attn", supports=Supports(window=True), load=load_flash, packages=("flash-attn-3", "flash_attn_3")
    ),
    Library(
        name="flashinfer",
        supports=Supports(window=True, soft_cap=True, module="flashinfer"),
        load=load_flashinfer,
        packages=("flashinfer-python",),
    ),
    Library(name="flex_attention", supports=Supports(window=True, soft_cap=True, cpu=True), load=load_flex),
)
"""In the order in which they are tried. The last is compiled first, for half a minute."""
