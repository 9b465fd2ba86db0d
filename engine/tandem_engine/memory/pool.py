"""The memory that holds K and V.

One contiguous tensor, page first, so that a page is one run of bytes: a transfer moves it with a single
descriptor and a digest reads it in a single pass.

    data   [page, layer, 2, kv_head, slot, head_dim]      2 = K, V
    page 0 is the dummy page: padding reads and writes it, so it must hold finite numbers (T38, T39)

The pool knows nothing about who owns which page.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from tandem_engine.errors import ConfigError
from tandem_engine.kernels.dispatch import by_triton
from tandem_engine.kernels.head_turn import HeadTurn
from tandem_engine.names import PageId

GIB = 1 << 30
ALIGNMENT = 4096
"""Of the pool in main memory: that of the machine's pages, which is what registering it for transfers rounds to."""


class PageLayout(NamedTuple):
    """What the bytes of a page are: [layers, 2, heads, slots, row_bytes]."""

    layers: int
    heads: int
    slots: int
    row_bytes: int
    """Of one head of one token."""

    @property
    def rows(self) -> int:
        return self.layers * 2 * self.heads * self.slots


class KvPool:
    """K and V of every layer for `num_pages` pages of `page_size` tokens. Written by the forward and by peers."""

    data: torch.Tensor
    """[num_pages, num_layers, 2, num_kv_heads, page_size, head_dim] of the pool's dtype, contiguous."""

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
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
        self.data = _zeros(shape, dtype, torch.device(device))
        self._bytes = self.data.view(num_pages, -1).view(torch.uint8)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self._bytes.shape[1]

    @property
    def layout(self) -> PageLayout:
        _, layers, _, heads, slots, head_dim = self.data.shape
        return PageLayout(layers, heads, slots, head_dim * self.data.dtype.itemsize)

    @property
    def address(self) -> int:
        """Where page 0 starts; page i starts `i * page_bytes` later."""
        return self.data.data_ptr()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes

    def key_value(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as views, each [num_pages, num_kv_heads, page_size, head_dim]."""
        return self.data[:, layer, 0], self.data[:, layer, 1]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        """Write one layer's new K and V.

        k, v           [T, num_kv_heads, head_dim], converted to the pool's dtype if they differ
        out_cache_loc  [T] int64 slots, `page * page_size + offset`; distinct, but for padding in page 0
        """
        keys, values = self.key_value(layer)
        if by_triton(self.data.device):
            from tandem_engine.kernels.store_kv import store_kv

            store_kv(k, v, keys, values, out_cache_loc)
            return
        pages = out_cache_loc // self.page_size
        slots = out_cache_loc % self.page_size
        keys[pages, :, slots] = k.to(keys.dtype)
        values[pages, :, slots] = v.to(values.dtype)

    def turn_and_store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_cache_loc: torch.Tensor, turn: HeadTurn
    ) -> torch.Tensor:
        """`store` on a device, of k that is turned on its way; q [T, heads, head_dim] turned as well, in one launch."""
        from tandem_engine.kernels.rope_store import rotate_and_store

        return rotate_and_store(q, k, v, turn, *self.key_value(layer), out_cache_loc)

    def copy_pages(self, copies: Sequence[tuple[PageId, PageId]]) -> None:
        """Copy whole pages, (source, target) each. No target may be a source."""
        self.copy_pages_of(*(torch.tensor(pages, device=self.data.device) for pages in zip(*copies, strict=True)))

    def copy_pages_of(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """As `copy_pages`, of page ids [N] int64 that are where the pool is."""
        if by_triton(self.data.device):
            from tandem_engine.kernels.page_copy import copy_pages

            copy_pages(self._bytes, sources, targets)
        else:
            self._bytes[targets] = self._bytes[sources]

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes], a view."""
        return self._bytes

    def page_view(self, page: PageId) -> torch.Tensor:
        """The bytes of one page: uint8 [page_bytes], a view."""
        return self._bytes[page]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch writes its zeros. numpy has them from calloc, so that a page costs memory when it is first used."""
    if device.type != "cpu":
        try:
            return torch.zeros(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{prod(shape) * dtype.itemsize / GIB:.2f} GiB of KV pages do not fit {device} any more: another "
                "process took memory after this one had measured it. Give each process on a card its "
                "--mem-fraction-static, with a sum of at most about 0.9"
            ) from error
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
