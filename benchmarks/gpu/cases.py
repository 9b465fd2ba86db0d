"""What each kernel is measured at: tensors of a real model's shapes, the work it cannot avoid, and how others do it.

    attention_cases.py   decodes and prompts
    layer_cases.py       what a layer computes besides
    table_cases.py       logits, rows and pages
    quantized_cases.py   products by quantized weights

Work is bytes that have to be read and written once, or floating-point operations; a share of the ceiling follows from
it. Peers compute the same from what suits them best (attention: dense K and V instead of pages), so that a kernel over
pages that is as fast as they are pays nothing for its pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gpu.shapes import Shape
from tandem_engine.memory.pool import KvPool

PAGE = 16
CASE_S = 5.0
"""What a case takes, roughly."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size."""

    name: str
    run: Callable[[], object]
    ceiling: Literal["copy", "matmul"]
    work: float
    """Bytes or operations."""
    target: float | None = None
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    takes_s: float = CASE_S
    """About so long, with its peers and all that is compiled for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the cases of a run."""

    decode: tuple[tuple[int, int], ...] = ((1, 4096), (16, 4096), (64, 4096), (16, 32768))
    """Sequences, and tokens that each of them has."""
    prompt: int = 8192
    tokens: int = 8192
    """Of a step, for what works token by token."""
    sampled: int = 64
    vocabulary: int = 151_936
    experts: int = 64
    expert_inner: int = 1024


TINY = Sizes(decode=((2, 40),), prompt=48, tokens=5, sampled=2, vocabulary=300, experts=4, expert_inner=64)


@dataclass(frozen=True, kw_only=True)
class CaseMaker:
    """Makes cases of one model on one device."""

    shape: Shape
    sizes: Sizes
    device: torch.device
    dtype: torch.dtype

    def cases(self) -> Iterator[Callable[[], Case]]:
        """What makes them. Each is made when it is measured and dropped after it."""
        raise NotImplementedError

    def copy_of(self, work: float) -> dict[str, Callable[[], object]]:
        """As a peer: a copy of as many bytes, for a few megabytes take longer than their share of gigabytes."""
        both = torch.empty((2, int(work) // 2), dtype=torch.uint8, device=self.device)
        return {"a copy of as many bytes": lambda: both[1].copy_(both[0])}

    def randn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def pool(self, pages: int) -> KvPool:
        """Of one layer; the dummy page comes on top."""
        made = KvPool(
            num_pages=pages + 1,
            num_layers=1,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            page_size=PAGE,
            dtype=self.dtype,
            device=self.device,
        )
        made.data.normal_()
        return made
