"""One range of memory for all weights of an adapter, in the order in which a step reads them.

A step reads each A and each B of its adapters once, for few tokens, so it takes as long as memory needs to answer. In
ranges of their own they lie on a page of 4 KiB or a few, and the processor ends its prefetching at each. Adjacent ones
are one run of bytes, and share pages of 2 MiB where they fill most of one.
"""

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tandem_engine.base.linux import HUGE, prefer_huge_pages
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterPart, SiteWeights

ALIGNED = 64
"""Bytes: a tensor begins with a line of the cache."""

FILLED = HUGE * 3 // 4
"""Bytes of a huge page from which it is worth its memory."""

Sites = Mapping[tuple[int, Site], SiteWeights]


def together(sites: Sites) -> Sites:
    """Copies of all tensors of an adapter, in one range. They keep it in memory as long as one of them exists."""
    if not sites:
        return {}
    order = sorted(sites, key=lambda place: (place[0], [*Site].index(place[1])))
    range_ = _Range(sum(map(_bytes, (tensor for place in order for tensor in _tensors(sites[place])))))
    return {place: _moved(sites[place], range_) for place in order}


def _tensors(site: SiteWeights) -> Iterable[Tensor]:
    return (site.a, *(part.b for part in site.parts))


def _bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _moved(site: SiteWeights, range_: "_Range") -> SiteWeights:
    a = range_.copy(site.a)
    return SiteWeights(a=a, parts=tuple(_moved_part(part, range_) for part in site.parts))


def _moved_part(part: AdapterPart, range_: "_Range") -> AdapterPart:
    return replace(part, b=range_.copy(part.b.t()).t())


class _Range:
    """Memory that tensors take from its beginning on."""

    def __init__(self, size: int) -> None:
        """Zeros of `size` bytes."""
        mapped = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        first = -memory.data_ptr() % HUGE
        whole = size // HUGE * HUGE + (HUGE if size % HUGE >= FILLED else 0)
        if whole:
            prefer_huge_pages(memory.data_ptr() + first, min(whole, len(memory) - first))
        self._rest = memory[first:]

    def copy(self, tensor: Tensor) -> Tensor:
        """`tensor`, dense."""
        taken, self._rest = self._rest[: tensor.nbytes], self._rest[_bytes(tensor) :]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)
