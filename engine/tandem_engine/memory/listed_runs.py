"""Runs of tokens of a step as tensors, so that layers with states of a device look at no length on the host.

    sequence   the tokens of one request in the step: its state is read before them and written after them
    chunk      up to `STATE_CHUNK` of its tokens. A chunk ends where a state is copied within a sequence, so copies are
               states after whole chunks
    decodes    the sequences of one token behind them, which are computed by a step of their own

The host lists them before a step is queued, in sizes that a captured graph has room for (`RunRoom`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_engine.forward.batch import ForwardBatch, ForwardMode
from tandem_engine.kernels.interface import by_triton
from tandem_engine.memory.cache_groups import STATE_CHUNK
from tandem_engine.memory.state_pool import Run, StatePool, StateSpec, runs_of

Ints = npt.NDArray[np.int64]

NO_SLOT = -1
"""Row of a decode that there is not."""


class RunRoom(NamedTuple):
    """Sizes of the lists of a step, or of a graph of steps that are not larger."""

    tokens: int
    sequences: int
    chunks: int
    decodes: int

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        """Of `batch`, on the host."""
        parts = list(runs_of(batch, batch.snapshots, most=batch.num_extend))
        chunks = sum(-(-(run.stop - run.start) // STATE_CHUNK) for run in parts)
        return cls(batch.num_tokens, batch.num_extend, chunks, batch.num_sequences - batch.num_extend)

    def holds(self, other: "RunRoom") -> bool:
        """Whether nothing of `other` is larger."""
        return all(own >= needed for own, needed in zip(self, other, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRuns:
    """See the module. int64 but where it says otherwise.

    N sequences, C chunks, D decodes, T tokens; `history` inputs of the convolution before a token.
    """

    rows: Tensor
    """[N] slots of the states; that of padding where there is no sequence."""
    fresh: Tensor
    """[N] bool, which of them begin with the step."""
    first_chunks: Tensor
    """int32 [N + 1]: sequence n has chunks first_chunks[n] up to first_chunks[n + 1]."""
    chunk_tokens: Tensor
    """[C, STATE_CHUNK] tokens of the step; T where a chunk has no more."""
    chunk_slots: Tensor
    """[C] where the state after the chunk is copied to; 0 for nowhere."""
    conv_inputs: Tensor
    """[T, history] inputs of the convolution before each token: in [history of each sequence ‖ tokens of the step]."""
    kept_slots: Tensor
    """[N + C] where newest inputs are kept: of each sequence, and of the copies after chunks."""
    kept_inputs: Tensor
    """[N + C, history] which, as in `conv_inputs`"""
    decode_tokens: Tensor
    """[D] T where there is no decode."""
    decode_rows: Tensor
    """[D] `NO_SLOT` where there is no decode."""
    decode_fresh: Tensor
    """[D] bool"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def load(self, given: "ListedRuns") -> None:
        """Have the values of `given`, of the same sizes, at the places of these tensors."""
        for own, new in zip(self.tensors, given.tensors, strict=True):
            own.copy_(new, non_blocking=True)


def inputs_before_a_token(states: StatePool | None) -> int | None:
    """Inputs of the convolution before a token, where layers keep `states` that kernels move on; else None."""
    if states is None or not isinstance(states.spec, StateSpec) or not by_triton(states.device):
        return None
    return states.spec.history


def can_list_runs(batch: ForwardBatch) -> bool:
    """Whether `batch` computes runs none of whose tokens may be rejected."""
    return batch.num_extend > 0 and batch.mode in (ForwardMode.EXTEND, ForwardMode.MIXED)


def no_runs(room: RunRoom, history: int, device: torch.device) -> ListedRuns:
    """Lists of a step without sequences."""
    listed = _listed((), _Decodes.none(), history, room)
    return ListedRuns(**{name: getattr(listed, name).to(device) for name in listed.__slots__})


def list_runs(batch: ForwardBatch, history: int, room: RunRoom) -> ListedRuns:
    """The lists of `batch`, on the host, which `room` holds."""
    parts = tuple(runs_of(batch, batch.snapshots, most=batch.num_extend))
    return _listed(parts, _Decodes.of(batch), history, room)


class _Decodes(NamedTuple):
    """int64 [D] each: the tokens, rows and lengths of a step's decodes."""

    tokens: Ints
    rows: Ints
    seq_lens: Ints

    @classmethod
    def of(cls, batch: ForwardBatch) -> Self:
        first = int(batch.extend_lens[: batch.num_extend].sum())
        rows, lens = (column[batch.num_extend :].numpy() for column in (batch.rows, batch.seq_lens))
        return cls(np.arange(first, first + len(rows)), rows, lens)

    @classmethod
    def none(cls) -> Self:
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing)


class _Chunk(NamedTuple):
    sequence: int
    start: int
    stop: int
    slot: int


def _listed(parts: Sequence[Run], decodes: _Decodes, history: int, room: RunRoom) -> ListedRuns:
    heads = _first_parts(parts)
    begins = np.array([run.start for run in heads], dtype=np.int64)
    chunks = _chunks(parts)
    ends = np.array([chunk.stop for chunk in chunks], dtype=np.int64)
    sequences = np.array([chunk.sequence for chunk in chunks], dtype=np.int64)
    last = np.cumsum(np.bincount(sequences, minlength=room.sequences))
    sequence_of = np.zeros(room.tokens, dtype=np.int64)
    in_chunk = np.zeros(room.tokens, dtype=bool)
    tokens = np.full((room.chunks, STATE_CHUNK), room.tokens)
    for number, chunk in enumerate(chunks):
        own = slice(chunk.start, chunk.stop)
        sequence_of[own] = chunk.sequence
        in_chunk[own] = True
        tokens[number, : chunk.stop - chunk.start] = np.arange(chunk.start, chunk.stop)

    def inputs_before(token: Ints, sequence: Ints) -> Ints:
        """[n, history] where the inputs before `token` [n], of `sequence` [n], are."""
        source = token[:, None] - history + np.arange(history)
        before = source - begins[sequence][:, None]
        kept = sequence[:, None] * history + history + before
        return np.where(before < 0, kept, room.sequences * history + source)

    every = np.arange(room.tokens)
    conv = np.broadcast_to(room.sequences * history + every[:, None], (room.tokens, history)).copy()
    computed = every[in_chunk]
    conv[computed] = inputs_before(computed, sequence_of[computed])
    slots = _filled([chunk.slot for chunk in chunks], room.chunks)
    kept = np.zeros((room.sequences + room.chunks, history), dtype=np.int64)
    present = np.arange(len(heads))
    if chunks:
        kept[: len(heads)] = inputs_before(ends[last[: len(heads)] - 1], present)
        kept[room.sequences : room.sequences + len(chunks)] = inputs_before(ends, sequences)
    rows = _filled([run.row for run in heads], room.sequences)
    return ListedRuns(
        rows=torch.from_numpy(rows),
        fresh=torch.from_numpy(_filled([run.fresh for run in heads], room.sequences, fill=1).astype(bool)),
        first_chunks=torch.from_numpy(np.concatenate(([0], last)).astype(np.int32)),
        chunk_tokens=torch.from_numpy(tokens),
        chunk_slots=torch.from_numpy(slots),
        conv_inputs=torch.from_numpy(conv),
        kept_slots=torch.from_numpy(np.concatenate((rows, slots))),
        kept_inputs=torch.from_numpy(kept),
        decode_tokens=torch.from_numpy(_filled(decodes.tokens, room.decodes, fill=room.tokens)),
        decode_rows=torch.from_numpy(_filled(decodes.rows, room.decodes, fill=NO_SLOT)),
        decode_fresh=torch.from_numpy(_filled(decodes.seq_lens, room.decodes, fill=1) == 1),
    )


def _first_parts(parts: Sequence[Run]) -> list[Run]:
    """Of each sequence: the parts of one follow one another and have its row."""
    return [run for place, run in enumerate(parts) if not place or parts[place - 1].row != run.row]


def _chunks(parts: Sequence[Run]) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    sequence = -1
    for place, run in enumerate(parts):
        sequence += not place or parts[place - 1].row != run.row
        slots = {run.start + copy.tokens: copy.slot for copy in run.snapshots}
        for start in range(run.start, run.stop, STATE_CHUNK):
            stop = min(start + STATE_CHUNK, run.stop)
            chunks.append(_Chunk(sequence, start, stop, slots.get(stop, 0)))
    return chunks


def _filled(values: Sequence[int] | Ints, size: int, *, fill: int = 0) -> Ints:
    filled = np.full(size, fill, dtype=np.int64)
    filled[: len(values)] = values
    return filled
