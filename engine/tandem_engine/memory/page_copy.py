"""Copies of whole pages that run in launch order with the forwards.

    scheduler thread                      forward thread (CPU) or stream (GPU)
    executor.copy(a)     ──────────────▶  page copy a
    executor.launch(N)   ──────────────▶  forward N: reads what a brought
    executor.copy(b)     ──────────────▶  page copy b: reads what N wrote

So a load-back that is queued before a launch is visible to that launch, and a backup that is queued after
the step that wrote a page sees its final bytes, without anybody waiting. Whoever is not on that thread
(a peer's NIXL write, a disk read) has to wait for the acknowledgement: see `copies`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch


class CopyKind(Enum):
    """From where to where."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """Copy page `source[i]` to page `target[i]`, one after the other in this order."""

    kind: CopyKind
    source: Sequence[int]
    target: Sequence[int]

    def __post_init__(self) -> None:
        assert len(self.source) == len(self.target), f"{len(self.source)} pages into {len(self.target)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """What a copy took, where it ran."""

    pages: int
    seconds: float


Copier: TypeAlias = Callable[[PageCopy], CopyReport]
"""Performs a copy. Called where forwards run, by nobody else."""


class Pages(Protocol):
    """Memory that is cut into pages of one size."""

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes], a view."""
        ...


class PageCopier:
    """A `Copier` between a KV pool and, if there is one, host pages. Both in the memory of this machine's CPU."""

    def __init__(self, device: Pages, host: Pages | None = None) -> None:
        self._ends: dict[CopyKind, tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = {}
        if host is not None:
            pages, mirror = device.bytes_view().numpy(), host.bytes_view().numpy()
            self._ends[CopyKind.DEVICE_TO_HOST] = (pages, mirror)
            self._ends[CopyKind.HOST_TO_DEVICE] = (mirror, pages)

    def __call__(self, copy: PageCopy) -> CopyReport:
        """Raises KeyError without host pages."""
        began = perf_counter()
        source, target = self._ends[copy.kind]
        # Row by row through numpy is a memcpy per page without the interpreter lock; gathering and scattering
        # with torch moves every byte twice and took three to fifty times as long for pages of 6 KiB to 2 MiB.
        for origin, destination in zip(copy.source, copy.target, strict=True):
            target[destination] = source[origin]
        return CopyReport(pages=len(copy.source), seconds=perf_counter() - began)


def refuse_copies(copy: PageCopy) -> CopyReport:
    """The `Copier` of an executor that was given none."""
    raise AssertionError(f"this executor has no copier and cannot execute {copy.kind.value}")
