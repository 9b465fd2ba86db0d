"""The inputs of a captured step with prompts: tensors that keep their addresses, and how a step is loaded into them."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from tandem_engine.base.names import DUMMY_PAGE
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.prompt_shape import DUMMY_SLOT, PromptShape
from tandem_engine.model.attention.backend import PromptGraphPlan


class PromptTensors(NamedTuple):
    """See `PromptGraphPlan`."""

    page_table: Tensor
    extend_lens: Tensor
    seq_lens: Tensor
    slots: Tensor

    @classmethod
    def of_padding(cls, shape: PromptShape, max_pages: int, *, page_size: int, device: torch.device) -> Self:
        """A step of padding alone, in pages of the device, of which sequences have at most `max_pages`."""
        # Padding has as many places in the dummy page as it has tokens.
        pages = max(max_pages, -(-shape.tokens // page_size))
        lens = torch.zeros((2, shape.rows), dtype=torch.int32, device=device)
        lens[:, -1] = shape.tokens
        return cls(
            page_table=torch.full((shape.rows, pages), DUMMY_PAGE, dtype=torch.int32, device=device),
            extend_lens=lens[0],
            seq_lens=lens[1],
            slots=torch.full((shape.tokens,), DUMMY_SLOT, dtype=torch.int64, device=device),
        )


def load_prompt(plan: PromptGraphPlan, batch: ForwardBatch) -> None:
    """Copy in `batch`, which is padded to the shape of `plan`, but for its page table.

    Rows of sequences without tokens keep what an earlier step had there: nothing reads them. The last row, that of
    padding, is never written.
    """
    rows, pages = batch.page_table.shape
    most_rows, most_pages = plan.page_table.shape
    assert batch.num_tokens == len(plan.slots), f"{batch.num_tokens} tokens for a graph of {len(plan.slots)}"
    assert rows < most_rows, f"{rows} sequences for a graph of {most_rows}, that of padding included"
    assert pages <= most_pages, f"{pages} pages for a graph of {most_pages}"
    plan.page_table[:rows, :pages].copy_(batch.page_table, non_blocking=True)
    plan.extend_lens.copy_(batch.extend_lens, non_blocking=True)
    plan.seq_lens.copy_(batch.seq_lens, non_blocking=True)
    plan.slots.copy_(batch.out_cache_loc, non_blocking=True)
