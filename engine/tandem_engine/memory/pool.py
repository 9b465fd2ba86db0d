"""The memory that holds K and V.

One contiguous tensor, page first, so that a page is one run of bytes: a transfer moves it with a single descriptor and
a digest reads it in a single pass.

    data   [page, layer, part, kv_head, slot, head_dim]   parts: K and V, or one latent, whose beginning is V
    page 0 is the dummy page: padding reads and writes it, so it must hold finite numbers [finite-padding] [dummy-page]

A pool of float8 has a scale for K and for V of each head of each layer, by which its numbers are multiplied when they
are read (`kernels.interface`). Scales are not part of a page: both sides of a transfer must have the same (ADR 0045).

The pool does not track owners of pages.
"""

import mmap
from collections.abc import Sequence
from copy import copy
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import NamedTuple, Self

import numpy as np
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import prefer_huge_pages
from tandem_engine.base.names import PageId
from tandem_engine.config import KvCacheDtype
from tandem_engine.kernels.interface import FLOAT8, HeadTurn, KvScales, by_triton, from_float8, to_float8
from tandem_engine.memory.cache_groups import CacheGroup, KvRow

GIB = 1 << 30

HUGE_PAGES_FROM = 4 << 20
"""Bytes of a pool in main memory. Below that huge pages save less than they take."""


class PageLayout(NamedTuple):
    """What the bytes of a page are: [layers, parts, heads, slots, row_bytes]."""

    layers: int
    heads: int
    slots: int
    row_bytes: int
    """Of one head of one token."""
    parts: int = 2
    """K and V, or one latent."""

    @property
    def rows(self) -> int:
        return self.layers * self.parts * self.heads * self.slots

    @property
    def second_part(self) -> int:
        """Heads from the first part of a layer to the last: 0 where there is one."""
        return (self.parts - 1) * self.heads


class KvPool:
    """K and V of the layers of one group for `num_pages` pages of `page_size` tokens. Written by the forward and by
    peers. Layers are counted within the group (`cache_groups`)."""

    data: torch.Tensor
    """[num_pages, num_layers, parts, num_kv_heads, page_size, head_dim] of the pool's dtype, contiguous."""
    scales: torch.Tensor | None
    """[num_layers, 2, num_kv_heads] float32, where the pool is; None unless its dtype is one of float8."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: torch.Tensor | None = None,
        value_width: int | None = None,
    ) -> None:
        """`scales`, of a pool of float8: copied; None is 1 for all heads. `value_width`: of a pool of latents, the
        numbers at the beginning of each that are V; None for K and V.
        """
        assert value_width is None or dtype not in FLOAT8, "latents have no scales"
        self.num_pages = num_pages
        self.page_size = page_size
        self.value_width = value_width
        shape = (num_pages, num_layers, 2 if value_width is None else 1, num_kv_heads, page_size, head_dim)
        self.data = zeroed(shape, dtype, torch.device(device))
        self._bytes = self.data.view(num_pages, -1).view(torch.uint8)
        self.scales = _ones(*shape[1:4], device=device) if dtype in FLOAT8 else None
        if scales is not None:
            self.set_scales(scales)

    @classmethod
    def of_group(
        cls,
        group: CacheGroup,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: torch.Tensor | None = None,
    ) -> Self:
        """Of the layers of `group`. `scales`: of all layers of the model."""
        heads, width = group.spec.row
        return cls(
            num_pages=num_pages,
            num_layers=len(group.layers),
            num_kv_heads=heads,
            head_dim=width,
            page_size=page_size,
            dtype=dtype,
            device=device,
            scales=None if scales is None else scales[list(group.layers)],
            value_width=group.spec.value_width,
        )

    def set_scales(self, scales: torch.Tensor) -> None:
        """Read and write with `scales` from now on, where those before were. What the pool holds loses its meaning."""
        assert self.scales is not None, f"scales for a pool of {self.data.dtype}"
        assert scales.shape == self.scales.shape, f"scales {tuple(scales.shape)} for {tuple(self.scales.shape)}"
        self.scales.copy_(scales)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self._bytes.shape[1]

    @property
    def layout(self) -> PageLayout:
        _, layers, parts, heads, slots, head_dim = self.data.shape
        return PageLayout(layers, heads, slots, head_dim * self.data.dtype.itemsize, parts)

    @property
    def address(self) -> int:
        """Where page 0 starts; page i starts `i * page_bytes` later."""
        return self.data.data_ptr()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes

    def of_rows(self, row: KvRow) -> Self:
        """The same memory for layers whose rows are `row`, of which one here is a whole number.

        Layer i of this pool is then layer i · that number; those between have no layer of the model.
        """
        pages, layers, parts, heads, slots, width = self.data.shape
        times, rest = divmod(heads * width, row.heads * row.width)
        assert not rest, f"rows of {heads} heads of {width} are no whole number of {row}"
        view = copy(self)
        view.data = self.data.view(pages, layers * times, parts, row.heads, slots, row.width)
        return view

    def key_value(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as views, each [num_pages, num_kv_heads, page_size, head_dim], V of latents narrower."""
        if self.value_width is None:
            return self.data[:, layer, 0], self.data[:, layer, 1]
        return self.data[:, layer, 0], self.data[:, layer, 0, :, :, : self.value_width]

    def scales_of(self, layer: int) -> KvScales | None:
        """Of one layer, where there are any."""
        return None if self.scales is None else KvScales(*self.scales[layer])

    def gathered(self, layer: int, pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens in `slots` of `pages`, both int64 [N], each float32 [N, num_kv_heads, head_dim]."""
        if self.value_width is not None:
            latents = self.data[:, layer, 0][pages, :, slots].float()
            return latents, latents[..., : self.value_width]
        sides = (side[pages, :, slots] for side in map(_indexable, self.key_value(layer)))
        scales = self.scales_of(layer)
        if scales is None:
            keys, values = (side.float() for side in sides)
        else:
            numbers = (side.view(self.data.dtype) for side in sides)
            keys, values = (from_float8(*pair) for pair in zip(numbers, scales, strict=True))
        return keys, values

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Write one layer's new K and V.

        k, v           [T, num_kv_heads, head_dim], converted to the pool's dtype if they differ; v of a latent is the
                       beginning of k
        out_cache_loc  [T] int64 slots, `page * page_size + offset`; distinct, but for padding in page 0
        """
        if by_triton(self.data.device):
            from tandem_engine.kernels.triton.store_kv import store_kv, store_latents

            if self.value_width is None:
                store_kv(k, v, *self.key_value(layer), out_cache_loc, scales=self.scales_of(layer))
            else:
                store_latents(k, self.key_value(layer)[0], out_cache_loc)
            return
        pages = out_cache_loc // self.page_size
        slots = out_cache_loc % self.page_size
        parts = self.layout.parts
        for side, numbers in zip(self.key_value(layer)[:parts], self.converted(layer, k, v)[:parts], strict=True):
            _indexable(side)[pages, :, slots] = _indexable(numbers)

    def converted(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v [T, num_kv_heads, head_dim] as the pages of `layer` hold them."""
        dtype, scales = self.data.dtype, self.scales_of(layer)
        if scales is None:
            return k.to(dtype), v.to(dtype)
        return to_float8(k, scales.k, dtype), to_float8(v, scales.v, dtype)

    def turn_and_store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_cache_loc: torch.Tensor, turn: HeadTurn
    ) -> torch.Tensor:
        """`store` on a device, of k that is turned on its way; q [T, heads, head_dim] turned as well, in one launch."""
        from tandem_engine.kernels.triton.rope_store import rotate_and_store

        return rotate_and_store(q, k, v, turn, *self.key_value(layer), out_cache_loc, scales=self.scales_of(layer))

    def copy_pages(self, copies: Sequence[tuple[PageId, PageId]]) -> None:
        """Copy whole pages, (source, target) each. No target may be a source."""
        self.copy_pages_of(*(torch.tensor(pages, device=self.data.device) for pages in zip(*copies, strict=True)))

    def copy_pages_of(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """As `copy_pages`, of page ids [N] int64 that are where the pool is."""
        if by_triton(self.data.device):
            from tandem_engine.kernels.triton.page_copy import copy_pages

            copy_pages(self._bytes, sources, targets)
        else:
            self._bytes[targets] = self._bytes[sources]

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes], a view."""
        return self._bytes

    def page_view(self, page: PageId) -> torch.Tensor:
        """The bytes of one page: uint8 [page_bytes], a view."""
        return self._bytes[page]


def _ones(*shape: int, device: torch.device | str) -> torch.Tensor:
    """float32, each row 16 bytes from the next or a multiple: kernels are compiled for addresses of that kind."""
    *rows, length = shape
    return torch.ones(*rows, -(-length // 4) * 4, device=device)[..., :length]


def _indexable(numbers: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that torch can index: of float8 it can do little but convert."""
    return numbers.view(torch.uint8) if numbers.dtype in FLOAT8 else numbers


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{prod(shape) * dtype.itemsize / GIB:.2f} GiB of KV pages do not fit {device} any more: another "
                "process took memory after this one had measured it. Give each process on a card its "
                "--mem-fraction-static, with a sum of at most about 0.9"
            ) from error
    return untouched_zeros(prod(shape) * dtype.itemsize).view(dtype).view(shape)


def untouched_zeros(size: int) -> torch.Tensor:
    """uint8 [size] in the memory of this machine, from the beginning of a page of the machine. A page of it costs
    memory when it is first used.

    torch writes its zeros. calloc may take memory that the heap holds already, and writes zeros there too.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = np.frombuffer(memory, dtype=np.uint8)[:size]
    if size >= HUGE_PAGES_FROM:
        prefer_huge_pages(numbers.ctypes.data, size)
    return torch.from_numpy(numbers)


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

E5M2_TRITON = (3, 7)
"""The first Triton that converts to and from e5m2 on devices before those: an older one emits instructions that they
lack, and its compiler fails at the first launch."""


def kv_dtype(requested: KvCacheDtype, model_dtype: torch.dtype) -> torch.dtype:
    """Of the pages of a model that computes in `model_dtype`."""
    return model_dtype if requested is KvCacheDtype.AUTO else DTYPES[requested]


def require_kv_dtype(requested: KvCacheDtype, device: str) -> None:
    """Raise `ConfigError` unless attention on `device`, which is there, reads such pages."""
    flag = f"--kv-cache-dtype {requested}"
    if device == "cpu":
        if requested is KvCacheDtype.FLOAT16:
            raise ConfigError(f"{flag} needs a GPU: attention on a CPU reads float32, bfloat16, fp8_e4m3 and fp8_e5m2")
        return
    dtype = DTYPES.get(requested)
    if dtype not in FLOAT8 or torch.cuda.get_device_capability(device) >= E4M3_CAPABILITY:
        return
    needed, name = ".".join(map(str, E4M3_CAPABILITY)), torch.cuda.get_device_name(device)
    triton = _triton_version()
    converts = triton >= E5M2_TRITON
    if dtype is torch.float8_e4m3fn:
        other = "fp8_e5m2 takes as little memory, bfloat16 is exact" if converts else "use bfloat16"
        raise ConfigError(f"{flag} needs a GPU of compute capability {needed} or more, and {name} has less: {other}")
    if not converts:
        raise ConfigError(
            f"{flag} on {name} (compute capability below {needed}) needs Triton {'.'.join(map(str, E5M2_TRITON))} or "
            f"newer, and {'.'.join(map(str, triton))} is installed: use --kv-cache-dtype bfloat16, or a torch that "
            "brings a newer Triton"
        )


def _triton_version() -> tuple[int, ...]:
    """Major and minor number of what is installed; () without it."""
    try:
        return tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return ()
