"""The one place where the schedulers of an engine's ranks exchange anything.

    agree    once per iteration, before anything is planned: rank 0 sends its inputs since the last one, and its time
    share    for values that one rank determines for all, such as drafts: rank 0's value [rank-zero-drafts]
    gather   for events of any rank that all need, such as completed writes of KV [least-of-ranks]
    least    for results that every rank reaches in its own time, such as a compiled grammar: each rank reports its
             progress, and the least counts for all [least-of-ranks] [record-after-writes]

All else in a scheduler is a function of its state and of these, so the ranks plan the same batches without further
exchange. Whether a collective is called, and with how many values, must follow from that common state alone: never from
what only this rank has, or from an early return [same-collectives].
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec
import torch

from tandem_engine.messages.codec import msgpack_decoder
from tandem_engine.parallel.group import TpGroup
from tandem_engine.parallel.inputs import Input

T = TypeVar("T")

Least: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""`Agreement.least`, for users of nothing else: the least value of all ranks, element by element. Called only while
there is something to compare, which all ranks have alike."""

INLINE_BYTES = 8192
"""Most turns carry nothing or one prompt: they fit the first message and need no second."""

LENGTH_BYTES = 8

GATHERED_BYTES = 1016
"""Of each rank: a few events of a transport."""

GATHER_WIDTH = LENGTH_BYTES + GATHERED_BYTES


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks act on in one turn."""

    now: float
    """Rank 0's monotonic clock: the only time that may decide anything."""
    inputs: tuple[Input, ...] = ()
    """In the order in which they are to be applied."""


class Agreement:
    """One rank's end. Scheduler thread only. Every method raises `RankLostError` when another rank has ended."""

    def __init__(self, group: TpGroup) -> None:
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgpack_decoder(Turn)
        self._inline = torch.zeros(LENGTH_BYTES + INLINE_BYTES, dtype=torch.uint8)

    @property
    def alone(self) -> bool:
        """There are no other ranks."""
        return self._group.size == 1

    def agree(self, *, now: float, inputs: Sequence[Input]) -> Turn:
        """Rank 0's turn, on every rank; what the others pass is ignored. Blocks until rank 0 calls it."""
        data = b""
        if self._group.rank == 0:
            data = self._encoder.encode(Turn(now=now, inputs=tuple(inputs)))
        turn: Turn = self._decoder.decode(self._broadcast(data))
        return turn

    def share(self, value: T, kind: type[T]) -> T:
        """Rank 0's `value`, of a `kind` that msgspec can encode, on every rank."""
        if self._group.size == 1:
            return value
        data = self._encoder.encode(value) if self._group.rank == 0 else b""
        shared: T = msgpack_decoder(kind).decode(self._broadcast(data))
        return shared

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """What each rank passes, of a `kind` that msgspec can encode, on every rank, in order of rank."""
        if self._group.size == 1:
            return [value]
        data = msgspec.msgpack.encode(value)
        first = self._gathered(len(data).to_bytes(LENGTH_BYTES, "little") + data[:GATHERED_BYTES], width=GATHER_WIDTH)
        lengths = [int.from_bytes(head[:LENGTH_BYTES], "little") for head in first]
        parts = [head[LENGTH_BYTES:] for head in first]
        if max(lengths) > GATHERED_BYTES:
            rests = self._gathered(data[GATHERED_BYTES:], width=max(lengths) - GATHERED_BYTES)
            parts = [part + rest for part, rest in zip(parts, rests, strict=True)]
        decode = msgpack_decoder(kind).decode
        return [decode(part[:length]) for part, length in zip(parts, lengths, strict=True)]

    def least(self, progress: Sequence[int]) -> list[int]:
        """The least over all ranks of how far each fact has come, element by element.

        Every rank names the same facts in the same order. Progress must not go back, or a rank could act on what
        another no longer has.
        """
        return self._group.least(torch.tensor(progress, dtype=torch.int64)).tolist() if progress else []

    def _gathered(self, data: bytes, *, width: int) -> list[bytes]:
        """Each rank's `data`, followed by zeros up to `width` bytes."""
        mine = torch.zeros((1, width), dtype=torch.uint8)
        mine[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[0, :0]
        everything = self._group.all_gather(mine).numpy().tobytes()
        return [everything[start : start + width] for start in range(0, len(everything), width)]

    def _broadcast(self, data: bytes) -> bytes:
        """Rank 0's `data`, on every rank."""
        inline = self._inline
        if self._group.rank == 0:
            head = len(data).to_bytes(LENGTH_BYTES, "little") + data[:INLINE_BYTES]
            inline[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._group.broadcast(inline)
        received = inline.numpy().tobytes()
        length = int.from_bytes(received[:LENGTH_BYTES], "little")
        whole = received[LENGTH_BYTES : LENGTH_BYTES + length]
        if length <= INLINE_BYTES:
            return whole
        rest = torch.empty(length - INLINE_BYTES, dtype=torch.uint8)
        if self._group.rank == 0:
            rest = torch.frombuffer(bytearray(data[INLINE_BYTES:]), dtype=torch.uint8)
        return whole + self._group.broadcast(rest).numpy().tobytes()
