"""A step of one sequence that nobody asked for: to test a model, or to measure it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_engine.executor.interface import Runner
from tandem_engine.forward.forward_batch import ForwardBatch, SamplingBatch
from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.names import PADDING_ROW, PageId


def lone_batch(
    tokens: Tensor, pages: Sequence[PageId], page_size: int, *, extend_len: int, every_token: bool = False
) -> ForwardBatch:
    """The last `extend_len` of `tokens` [N] as one sequence on `pages`, whose KV of the others is there.

    `every_token`: with logits after each of them, as if all but the first were drafts; else after the last.
    """
    length = len(tokens)
    positions = torch.arange(length - extend_len, length)
    page_table = torch.tensor([list(pages)], dtype=torch.int32)
    is_decode = extend_len == 1
    return ForwardBatch(
        step=0,
        mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
        input_ids=tokens[-extend_len:],
        positions=positions,
        out_cache_loc=page_table[0, positions // page_size].long() * page_size + positions % page_size,
        rows=torch.tensor([PADDING_ROW]),
        seq_lens=torch.tensor([length]),
        extend_lens=torch.tensor([extend_len]),
        page_table=page_table,
        num_extend=0 if is_decode else 1,
        sample_index=torch.tensor([0]),
        sampling=_no_sampling(),
        draft_lens=(extend_len - 1,) if every_token and not is_decode else (),
    )


@torch.inference_mode()
def logits_of(runner: Runner, batch: ForwardBatch) -> Tensor:
    """See `Runner.logits`; for whoever is not the executor."""
    return runner.logits(batch)


def _no_sampling() -> SamplingBatch:
    empty, none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    return SamplingBatch(
        temperature=empty, top_k=none, top_p=empty, min_p=empty, seed=none, position=none, all_greedy=True
    )
