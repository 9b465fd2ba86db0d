"""States of the fake model: what a layer that keeps one remembers of a sequence is its length and a hash of its tokens.

A state is changed in place, step by step, as a real one. One that was read at another length, of another request,
twice or not at all has another hash than what is read from the pages, and becomes a wrong token.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.memory.pool import PageLayout

SLOT_BYTES = 16
"""Two numbers of 64 bits, length and hash."""


class State(NamedTuple):
    length: int
    digest: int


BEGIN = State(0, 0)


def following(state: State, tokens: Sequence[int]) -> State:
    """After `tokens` more."""
    length, digest = state
    for token in tokens:
        digest = crc32(f"{token} at {length}".encode(), digest)
        length += 1
    return State(length, digest)


class FakeStates:
    """Implements `StateSlots`. Rows of requests, and slots of anchors behind them."""

    name = "a length and a hash"
    key_heads = 0
    head_blocks: tuple[int, ...] = ()

    def __init__(self, *, rows: int, anchors: int) -> None:
        self.anchor_slots = range(1 + rows, 1 + rows + anchors)
        self._slots = torch.full((self.anchor_slots.stop, 2), -1, dtype=torch.int64)

    @property
    def num_pages(self) -> int:
        return len(self._slots)

    @property
    def page_bytes(self) -> int:
        return SLOT_BYTES

    @property
    def layout(self) -> PageLayout:
        return PageLayout(layers=1, heads=1, slots=1, row_bytes=SLOT_BYTES, parts=1)

    @property
    def address(self) -> int:
        return self._slots.data_ptr()

    def bytes_view(self) -> Tensor:
        return self._slots.view(torch.uint8)

    def step(self, batch: ForwardBatch, input_ids: Tensor) -> list[State]:
        """Of each sequence after its tokens of `batch`, whose ids are `input_ids`."""
        for source, target in batch.state_copies:
            self._slots[target] = self._slots[source]
        runs = input_ids.split(batch.extend_lens.tolist())
        return [self._run(batch, sequence, run.tolist()) for sequence, run in enumerate(runs)]

    def _run(self, batch: ForwardBatch, sequence: int, tokens: Sequence[int]) -> State:
        row, before = int(batch.rows[sequence]), int(batch.seq_lens[sequence]) - len(tokens)
        length, digest = self._slots[row].tolist() if before else BEGIN
        state = State(length, digest)
        for cut in (each for each in batch.snapshots if each.sequence == sequence):
            state, tokens = following(state, tokens[: cut.length - before]), tokens[cut.length - before :]
            before = cut.length
            self._slots[cut.slot] = torch.tensor(state)
        state = following(state, tokens)
        self._slots[row] = torch.tensor(state)
        return state
