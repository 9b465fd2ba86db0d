"""Rows: which pages hold the tokens of each request.

Life of a row
    1. `alloc`        all zeros, that is, every entry names the dummy page
    2. `write`        pages in token order, without gaps
    3. `free`         zeroed at once, and given out again
       `free_after`   zeroed at once, given out again when the step has settled

Zeroing when a row is freed, not when it is given out, keeps "past what was written there is only the
dummy page" true of every row at every moment. Readers on the device never see the table itself but a
snapshot in the `ForwardBatch`, so it can change under a running forward. What a running forward still
uses is the row *number*, as its place in the FutureMap: hence the fence.
"""

from collections.abc import Iterator, Sequence

import torch

from tandem_engine.memory.fence import StepFence
from tandem_engine.names import PADDING_ROW, PageId, ReqPoolIdx


class ReqToTokenPool:
    """Rows 1..max_rows for requests; row 0 is padding and stays zero. Scheduler thread only."""

    table: torch.Tensor
    """[max_rows + 1, max_pages] int32 page ids on the CPU; 0, the dummy page, where nothing was written."""

    def __init__(self, max_rows: int, max_pages: int) -> None:
        """`max_pages` bounds the pages of one request: its longest sequence, the overshoot token included."""
        self.max_rows = max_rows
        self.max_pages = max_pages
        self.table = torch.zeros(max_rows + 1, max_pages, dtype=torch.int32)
        # Shares memory with the table; assigning a short list is several times cheaper than through torch.
        self._entries = self.table.numpy()
        self._written = [0] * (max_rows + 1)
        self._in_use = bytearray(max_rows + 1)
        self._free = [ReqPoolIdx(row) for row in range(max_rows, PADDING_ROW, -1)]
        self._fence: StepFence[ReqPoolIdx] = StepFence()

    @property
    def available(self) -> int:
        """Rows that can be given out now."""
        return len(self._free)

    def alloc(self) -> ReqPoolIdx | None:
        """A zeroed row, or None when all are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self._in_use[row] = True
        return row

    def write(self, row: ReqPoolIdx, first_page_index: int, pages: Sequence[PageId]) -> None:
        """Set entries [first_page_index, first_page_index + len(pages)) of `row`."""
        end = first_page_index + len(pages)
        assert self._in_use[row], f"row {row} is free and cannot be written"
        assert first_page_index <= self._written[row], (
            f"row {row} has {self._written[row]} pages; writing at {first_page_index} leaves a gap"
        )
        assert end <= self.max_pages, f"row {row} would need {end} pages and a row holds {self.max_pages}"
        self._entries[row, first_page_index:end] = pages
        self._written[row] = max(self._written[row], end)

    def free(self, row: ReqPoolIdx) -> None:
        """Give `row` back. A second time is a bug and raises AssertionError."""
        self._retire(row)
        self._free.append(row)

    def free_after(self, step: int, row: ReqPoolIdx) -> None:
        """Give `row` back; nobody gets it before `step` has settled."""
        self._retire(row)
        if self._fence.passed(step):
            self._free.append(row)
        else:
            self._fence.hold(step, (row,))

    def settled(self, step: int) -> None:
        """`step` and all before it have settled."""
        self._free += self._fence.settled(step)

    def in_use(self) -> Iterator[ReqPoolIdx]:
        """Every row that a request has (audit)."""
        return (ReqPoolIdx(row) for row, used in enumerate(self._in_use) if used)

    def _retire(self, row: ReqPoolIdx) -> None:
        assert self._in_use[row], f"row {row} freed twice, or never given out"
        self._in_use[row] = False
        self._entries[row, : self._written[row]] = 0
        self._written[row] = 0
