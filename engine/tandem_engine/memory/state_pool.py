"""The memory of layers that keep a state of fixed size for each sequence, in place of K and V.

A state is two parts: the newest inputs of a convolution, in the model's dtype, and a matrix for each head, in float32.
All layers of one sequence are one run of bytes:

    bytes  [slot, heads of all layers ‖ inputs of all layers]
    slot 0 is the dummy: steps that measure or pad read and write it
    behind those of requests are those of anchors (`state_anchors`)

The slot of a sequence is the row of its request. So admission, release, fence and audit of rows are those of states,
and a request has a state as soon as it has a row: none waits for the other.

Where a sequence begins nothing is read: its step takes zeros, whatever the slot holds [stale-bytes-unread]. States
change in place, in the order of steps, so a row that is given to another request needs no clearing and no further
fence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tandem_engine.config import StatePart
from tandem_engine.forward.batch import ForwardBatch, ForwardMode, Snapshot
from tandem_engine.kernels.interface import DeltaStep, DeltaWeights
from tandem_engine.memory.cache_groups import STATE_CHUNK
from tandem_engine.memory.pool import PageLayout, zeroed

ALIGNMENT = 256
"""Bytes that a slot is a multiple of."""

NO_SAMPLE = -1
"""Drafts of a sequence that samples nothing."""


def slot_room(used: int) -> int:
    """Bytes of a slot with so many in use."""
    return -(-used // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """What one rank keeps of a sequence."""

    layers: int
    history: int
    """Inputs of the convolution before the next token."""
    channels: int
    """Of the convolution."""
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    """Of the model."""

    @property
    def matrices(self) -> tuple[int, ...]:
        """Shape of what is kept in float32."""
        return self.layers, self.heads, self.key_size, self.value_size

    @property
    def inputs(self) -> tuple[int, ...]:
        """Shape of what is kept in the model's dtype."""
        return self.layers, self.history, self.channels

    @property
    def matrix_bytes(self) -> int:
        return prod(self.matrices) * torch.float32.itemsize

    @property
    def slot_bytes(self) -> int:
        """Of one sequence."""
        return slot_room(self.matrix_bytes + prod(self.inputs) * self.dtype.itemsize)

    @property
    def key_heads(self) -> int:
        """Each has as many of `heads`. 0: `channels` are not q, k and v of heads."""
        keys, rest = divmod(self.channels - self.heads * self.value_size, 2 * self.key_size)
        return keys if keys > 0 and not rest and self.heads % keys == 0 else 0

    @property
    def head_blocks(self) -> tuple[int, ...]:
        """Bytes of one key head in each run of heads of a slot, in order; empty where they cannot be distinguished.

        A run has all heads, one after the other: one of matrices per layer, then of inputs per layer and token three,
        of q, k and v. Ranks divide a state by these, never by bytes [state-heads-by-rank].
        """
        if not self.key_heads:
            return ()
        of_values = self.heads // self.key_heads * self.value_size
        matrices = (of_values * self.key_size * torch.float32.itemsize,) * self.layers
        inputs = tuple(width * self.dtype.itemsize for width in (self.key_size, self.key_size, of_values))
        blocks = matrices + inputs * (self.layers * self.history)
        # So that the bytes of a slot say how many heads it has.
        return blocks if sum(blocks) > ALIGNMENT else ()

    def views(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Matrices and inputs of all `slots`, uint8 [slots, slot_bytes]."""
        inputs = slice(self.matrix_bytes, self.matrix_bytes + prod(self.inputs) * self.dtype.itemsize)
        return (
            slots[:, : self.matrix_bytes].view(torch.float32).view(len(slots), *self.matrices),
            slots[:, inputs].view(self.dtype).view(len(slots), *self.inputs),
        )

    @property
    def name(self) -> str:
        """What the bytes of a slot are."""
        matrices, inputs = ("x".join(map(str, shape)) for shape in (self.matrices, self.inputs))
        return f"{matrices} float32 and {inputs} {str(self.dtype).removeprefix('torch.')}"


class ShapedPart(NamedTuple):
    """A tensor of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def room(self) -> int:
        """Its bytes in a slot."""
        return slot_room(prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartedSpec:
    """What an engine keeps of a sequence for layers that transformers computes: tensors one after the other."""

    parts: tuple[ShapedPart, ...]
    layers: int
    key_heads: ClassVar[int] = 0
    head_blocks: ClassVar[tuple[int, ...]] = ()
    """Ranks do not divide them."""

    @property
    def slot_bytes(self) -> int:
        """Of one sequence."""
        return sum(part.room for part in self.parts)

    @property
    def name(self) -> str:
        """What the bytes of a slot are."""
        return ", ".join(
            f"{'x'.join(map(str, part.shape))} {str(part.dtype).removeprefix('torch.')}" for part in self.parts
        )

    def views(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Each part of all `slots`, uint8 [slots, slot_bytes], as a view [slots, *shape]."""
        found, start = [], 0
        for part in self.parts:
            size = prod(part.shape) * part.dtype.itemsize
            found.append(slots[:, start : start + size].view(part.dtype).view(len(slots), *part.shape))
            start += part.room
        return tuple(found)


def parted_spec(parts: Sequence[StatePart]) -> PartedSpec:
    """Of `ModelConfig.state_parts`."""
    shaped = tuple(ShapedPart(part.shape, getattr(torch, part.dtype)) for part in parts)
    return PartedSpec(parts=shaped, layers=len({part.layer for part in parts}))


class StateCopy(NamedTuple):
    """Of the state after so many tokens of a run."""

    tokens: int
    slot: int


class Run(NamedTuple):
    """Tokens [start, stop) of a step, which are of one sequence."""

    start: int
    stop: int
    row: int
    fresh: bool
    """The sequence begins with them; false after a state that was received or loaded [received-state-kept]."""
    snapshots: tuple["StateCopy", ...] = ()
    """Of the state within them or after them, ascending: after whole chunks, or the last token."""

    def parts(self) -> "Iterator[Run]":
        """Runs that follow one another, with no copy but after their last token."""
        start, fresh = self.start, self.fresh
        for copy in self.snapshots:
            stop = self.start + copy.tokens
            yield Run(start, stop, self.row, fresh=fresh, snapshots=(StateCopy(stop - start, copy.slot),))
            start, fresh = stop, False
        if start < self.stop:
            yield Run(start, self.stop, self.row, fresh=fresh)


class StatePool:
    """States of the sequences of an engine. Read and written by forwards and, of rows that wait for one, by peers."""

    def __init__(
        self, spec: StateSpec | PartedSpec, *, rows: int, anchors: int = 0, device: torch.device | str
    ) -> None:
        """Of so many requests, and copies."""
        self.spec = spec
        self.rows = rows
        self.anchor_slots = range(1 + rows, 1 + rows + anchors)
        num_slots = self.anchor_slots.stop
        self._bytes = zeroed((num_slots, spec.slot_bytes), torch.uint8, torch.device(device))
        # By words, and each slot's view made once: a step of many decodes copies as many slots.
        self._slots = self._bytes.view(torch.int64).unbind(0)
        self.views = spec.views(self._bytes)
        """Of each part of all slots."""

    @property
    def matrices(self) -> Tensor:
        """Of a `StateSpec`: float32 [slots, layers, heads, key_size, value_size]."""
        return self.views[0]

    @property
    def inputs(self) -> Tensor:
        """Of a `StateSpec`: [slots, layers, history, channels]."""
        return self.views[1]

    @property
    def total_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    # As transfers see it: slots are pages.

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def num_pages(self) -> int:
        return len(self._bytes)

    @property
    def page_bytes(self) -> int:
        return self.spec.slot_bytes

    @property
    def key_heads(self) -> int:
        return self.spec.key_heads

    @property
    def head_blocks(self) -> tuple[int, ...]:
        return self.spec.head_blocks

    @property
    def layout(self) -> PageLayout:
        return PageLayout(layers=1, heads=1, slots=1, row_bytes=self.spec.slot_bytes, parts=1)

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Whole slots, (source, target) each, one after the other."""
        for source, target in copies:
            self._slots[target].copy_(self._slots[source])

    def bytes_view(self) -> Tensor:
        """The bytes of all slots: uint8 [slots, slot_bytes], a view."""
        return self._bytes


class DraftedInputs(NamedTuple):
    """What a layer made of the tokens of runs of drafts: a state after any number of them follows from it."""

    inputs: Tensor
    """[N, history + L, channels], those before the run included"""
    key: Tensor
    """float32 [N, L, heads, key_size]"""
    value: Tensor
    """float32 [N, L, heads, value_size]"""
    decay: Tensor
    """float32 [N, L, heads], as a logarithm"""
    beta: Tensor
    """float32 [N, L, heads]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedRuns:
    """The last N sequences of a step, each with up to L tokens of which some may be rejected drafts.

    The step leaves their states as they are. They are computed once it is known how many tokens count
    [drafts-move-states].
    """

    rows: Tensor
    """[N] int64"""
    tokens: Tensor
    """[N, L] int64: indices among the step's tokens; behind the last token of a run, that token again"""
    places: Tensor
    """[T] int64: where in [N, L], flat, each token of theirs is"""
    layers: list[DraftedInputs]
    """Of the layers that the step has passed."""

    @classmethod
    def of(cls, batch: ForwardBatch, count: int) -> "DraftedRuns":
        """The last `count` sequences of `batch`. Waits for no device."""
        host_lens = batch.host.extend_lens[-count:]
        longest, total = int(host_lens.max()), int(host_lens.sum())
        lens = batch.extend_lens[-count:]
        starts = batch.extend_lens.cumsum(0)[-count:] - lens
        order = torch.arange(longest, device=lens.device)
        sequence = torch.repeat_interleave(torch.arange(count, device=lens.device), lens, output_size=total)
        tokens = starts[:, None] + torch.minimum(order, lens[:, None] - 1)
        first = int(batch.host.extend_lens.sum()) - total
        inside = torch.arange(first, first + total, device=lens.device) - starts.index_select(0, sequence)
        return cls(rows=batch.rows[-count:], tokens=tokens, places=sequence * longest + inside, layers=[])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStates:
    """States of the sequences of one step: runs first, then sequences of one token, or runs of drafts."""

    pool: StatePool
    runs: tuple[Run, ...]
    decodes: Tensor | None
    """[N] int64 rows of the sequences of one token; None where there are none."""
    fresh: Tensor | None
    """[N] bool, which of them begin with that token; None where it is known that none does."""
    first_decode: int
    """Tokens before those."""
    drafted: DraftedRuns | None = None
    """None where no sequence has drafts; else there are no decodes."""

    @classmethod
    def of(cls, pool: StatePool, batch: ForwardBatch) -> "StepStates":
        """Queued like the forward itself where the step is on a device, so a graph can run it."""
        runs: tuple[Run, ...] = ()
        count = _drafted_sequences(batch.host) if batch.mode is ForwardMode.TARGET_VERIFY else 0
        if batch.num_extend > count:
            runs = tuple(runs_of(batch.host, batch.snapshots, most=batch.num_extend - count))
        drafted = DraftedRuns.of(batch, count) if count else None
        decodes = fresh = None
        if batch.num_extend < batch.num_sequences:
            decodes = batch.rows[batch.num_extend :]
            fresh = batch.seq_lens[batch.num_extend :] == 1
        first = runs[-1].stop if runs else 0
        return cls(pool=pool, runs=runs, decodes=decodes, fresh=fresh, first_decode=first, drafted=drafted)

    @classmethod
    def of_listed(cls, pool: StatePool) -> "StepStates":
        """Of a step whose sequences are elsewhere (`listed_runs`)."""
        return cls(pool=pool, runs=(), decodes=None, fresh=None, first_decode=0)

    def of_run(self, layer: int, run: Run) -> tuple[Tensor, Tensor]:
        """Inputs [history, channels] and matrices before `run`: zeros, or those kept."""
        inputs, matrices = self.pool.inputs[run.row, layer], self.pool.matrices[run.row, layer]
        return (torch.zeros_like(inputs), torch.zeros_like(matrices)) if run.fresh else (inputs, matrices)

    def keep(self, layer: int, slot: int, inputs: Tensor, matrices: Tensor) -> None:
        """What a run, or the part of it before a copy, leaves behind."""
        self.pool.inputs[slot, layer].copy_(inputs)
        self.pool.matrices[slot, layer].copy_(matrices)

    def of_rows(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of inputs [N, history, channels] and matrices [N, heads, key_size, value_size] in `rows` [N]."""
        return self.pool.inputs[:, layer].index_select(0, rows), self.pool.matrices[:, layer].index_select(0, rows)

    def of_decodes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of inputs [N, history, channels] and matrices [N, heads, key_size, value_size]."""
        assert self.decodes is not None, "a step without decodes"
        inputs, matrices = self.of_rows(layer, self.decodes)
        if self.fresh is not None:
            # Not by a product: what is left in a slot may be no number.
            inputs.masked_fill_(self.fresh[:, None, None], 0.0)
            matrices.masked_fill_(self.fresh[:, None, None, None], 0.0)
        return inputs, matrices

    def stepped(self, layer: int, step: DeltaStep, projected: Tensor, rates: Tensor, weights: DeltaWeights) -> Tensor:
        """Outputs of the decodes by `step`, which changes their states in place."""
        assert self.decodes is not None, "a step without decodes"
        fresh = torch.zeros_like(self.decodes, dtype=torch.bool) if self.fresh is None else self.fresh
        inputs, matrices = self.pool.inputs[:, layer], self.pool.matrices[:, layer]
        return step(projected, rates, inputs, matrices, self.decodes, fresh, weights)

    def without_decodes(self) -> "StepStates":
        """The runs alone."""
        return replace(self, decodes=None, fresh=None)

    def keep_decodes(self, layer: int, rows: Tensor, inputs: Tensor, matrices: Tensor) -> None:
        """What the decodes in `rows` leave behind. The dummy slot may be written more than once."""
        self.pool.inputs[:, layer].index_copy_(0, rows, inputs)
        self.pool.matrices[:, layer].index_copy_(0, rows, matrices)


def _drafted_sequences(host: ForwardBatch) -> int:
    """How many of the last sequences are running requests, in a step in which some have drafts."""
    drafts = dict(zip(host.sample_index.tolist(), host.draft_lens, strict=True))
    count = 0
    lens = zip(host.extend_lens.tolist(), host.seq_lens.tolist(), strict=True)
    for sequence, (length, total) in reversed([*enumerate(lens)]):
        if length == total or drafts.get(sequence, NO_SAMPLE) + 1 != length:
            break
        count += 1
    return count


def runs_of(host: ForwardBatch, snapshots: Sequence[Snapshot], *, most: int) -> Iterator[Run]:
    """Of the first `most` sequences, which have runs of tokens, each cut where its state is copied within a chunk of
    its run."""
    columns = (host.rows, host.extend_lens, host.seq_lens)
    start = 0
    for sequence, (row, length, total) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if sequence == most:
            return
        stop, fresh = start + length, total == length
        copies: list[StateCopy] = []
        for each in snapshots:
            if each.sequence != sequence:
                continue
            tokens = stop - (total - each.length) - start
            copies.append(StateCopy(tokens, each.slot))
            if tokens % STATE_CHUNK:
                yield Run(start, start + tokens, row, fresh=fresh, snapshots=tuple(copies))
                start, fresh, copies = start + tokens, False, []
        yield Run(start, stop, row, fresh=fresh, snapshots=tuple(copies))
        start = stop
