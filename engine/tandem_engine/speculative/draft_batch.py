"""Batches of a draft model: `ForwardBatch`es over pages that belong to the target's requests.

A draft model has a pool of its own with as many pages of the same size as the target's, so page i of a
request is page i in both, and one row of the page table serves both. A draft model that sees only a window of
the text reads a row from the window's first page on: to attention the sequence then starts there, while
positions, which rotary embeddings need, stay those of the whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tandem_engine.forward.forward_batch import ForwardBatch, SamplingBatch
from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.sampling import SamplingParams

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens [start, start + len(token_ids)) of one request, to be computed by the draft model."""

    kv: RequestKv
    window: int
    """First token that the draft model sees, a multiple of the page size."""
    start: int
    token_ids: Sequence[int]
    samples: bool
    sampling: SamplingParams

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def make_batch(spans: Sequence[Span], *, page_size: int, mode: ForwardMode) -> ForwardBatch:
    """`spans` as one step in which those that sample draw the token behind their last one."""
    lens = [len(span.token_ids) for span in spans]
    table = _page_table(spans, page_size)
    positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in spans])
    in_window = positions - np.repeat(_ints([span.window for span in spans]), lens)
    pages = table[np.repeat(np.arange(len(spans)), lens), in_window // page_size].astype(np.int64)
    sampling = [span for span in spans if span.samples]
    return ForwardBatch(
        step=0,
        mode=mode,
        input_ids=_tensor([token for span in spans for token in span.token_ids]),
        positions=torch.from_numpy(positions),
        out_cache_loc=torch.from_numpy(pages * page_size + in_window % page_size),
        rows=_tensor([span.kv.row for span in spans]),
        seq_lens=_tensor([span.stop - span.window for span in spans]),
        extend_lens=_tensor(lens),
        page_table=torch.from_numpy(table),
        num_extend=len(spans) if mode is ForwardMode.DRAFT_EXTEND else 0,
        sample_index=_tensor([index for index, span in enumerate(spans) if span.samples]),
        sampling=_coupled(sampling),
    )


def _page_table(spans: Sequence[Span], page_size: int) -> npt.NDArray[np.int32]:
    """[spans, pages of the longest] int32; 0, the dummy page, behind a sequence's last page."""
    parts = [span.kv.pages[span.window // page_size : -(-span.stop // page_size)] for span in spans]
    table = np.zeros((len(spans), max(map(len, parts))), dtype=np.int32)
    for row, pages in enumerate(parts):
        table[row, : len(pages)] = pages
    return table


def _coupled(spans: Sequence[Span]) -> SamplingBatch:
    """Sampling with the noise that the target will have at the same positions (see `speculative.verify`).

    Penalties, biases and grammars are left to the target: a draft that breaks them is rejected.
    """
    params = [span.sampling for span in spans]
    return SamplingBatch(
        temperature=torch.tensor([0.0 if p.greedy else p.temperature for p in params], dtype=torch.float32),
        top_k=_tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seed=_tensor([p.seed for p in params]),
        position=_tensor([span.stop for span in spans]),
        all_greedy=all(p.greedy for p in params),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _tensor(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
