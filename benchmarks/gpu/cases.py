"""What each kernel is measured at: tensors of a real model's shapes, the work it cannot avoid, and how others do it.

    attention_cases.py   decodes and prompts
    latent_cases.py      the same over latents
    expert_cases.py      experts of a real model
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
FILLED = 1 << 30
"""Bytes of a pool that are filled at once."""


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
    facts: dict[str, float] = field(default_factory=dict)
    """What else is known of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the cases of a run."""

    decode: tuple[tuple[int, int], ...] = (
        (64, 4096),
        (1, 4096),
        (16, 4096),
        (16, 32768),
        (256, 512),
        (1, 32768),
        (64, 512),
        (256, 4096),
        (1, 512),
    )
    """Sequences, and tokens that each of them has; the most important first."""  # fmt: skip
    float8: tuple[tuple[int, int], ...] = ((64, 4096), (16, 32768), (16, 4096))
    """The same, of pages of float8."""
    pool: tuple[int, int] = (64, 4096)
    """The same, of a pool that fills the device."""
    prompts: tuple[tuple[int, int], ...] = ((8192, 0), (2048, 0), (32768, 0), (1024, 0), (4096, 0), (2048, 8192))
    """Tokens of a prompt, and those before it that the pool has already."""
    prompt: int = 8192
    """Of the products by quantized weights."""
    tokens: int = 8192
    """Of a step, for what works token by token."""
    sampled: int = 64
    vocabulary: int = 151_936
    experts: int = 64
    expert_inner: int = 1024
    expert_tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 8192)


TINY = Sizes(
    decode=((2, 40), (16, 8)), float8=((2, 40),), pool=(2, 24), prompts=((48, 0), (16, 32)), prompt=48, tokens=5,
    sampled=2, vocabulary=300, experts=4, expert_inner=64, expert_tokens=(1, 5),
)  # fmt: skip


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

    def pool(self, pages: int, *, page_size: int = PAGE, layers: int = 1, dtype: torch.dtype | None = None) -> KvPool:
        """Filled with numbers; the dummy page comes on top."""
        made = KvPool(
            num_pages=pages + 1,
            num_layers=layers,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            page_size=page_size,
            dtype=dtype or self.dtype,
            device=self.device,
        )
        for page in made.data.split(max(1, FILLED // made.page_bytes)):
            page.copy_(torch.randn(page.shape, dtype=torch.float16, device=self.device))
        return made
