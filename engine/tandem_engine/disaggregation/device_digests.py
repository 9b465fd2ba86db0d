"""Digests of pages on a device, queued at once and fetched later.

    host      a table of pages, bases and slots in use, in pinned memory
    queued    table to the device ─▶ one kernel, which adds to the table's sums ─▶ sums to pinned memory ─▶ event
    later     `ready` queries the event, `take` mixes bases and sums

Nothing waits for the device: the caller transfers pages in the meantime, and looks. The stream is ahead of others, so
a digest does not wait until a whole step has been computed; between two kernels of a step there is room for it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem_engine.base.names import DigestKind
from tandem_engine.disaggregation import digest_triton
from tandem_engine.disaggregation.digest_words import gathered, mixed
from tandem_engine.kernels.cpu.page_digests import Indices, Keys
from tandem_engine.memory.pool import PageLayout

AHEAD = -1
"""Priority of the stream."""


class Arrival(Protocol):
    """`torch.cuda.Event`, as far as it is used here."""

    def query(self) -> bool:
        """Whether the device got there."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Arrived:
    """An arrival that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class DeviceQueue:
    """Where digests are queued: a stream of a GPU. On a CPU, where kernels are interpreted, all is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if self.on_gpu:
            self._stream = torch.cuda.Stream(device, priority=AHEAD)  # type: ignore[no-untyped-call]

    def on(self) -> AbstractContextManager[object]:
        """What is queued inside is queued here."""
        on: AbstractContextManager[object] = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        return on

    def host_memory(self, *shape: int) -> Tensor:
        """int64, and pinned: copies to and from the device do not block the host."""
        # Pinned by the context of the current device, which need not be this one.
        with torch.cuda.device(self.device) if self.on_gpu else nullcontext():
            return torch.empty(shape, dtype=torch.int64, pin_memory=self.on_gpu)

    def record(self) -> "Arrival":
        """What is queued until now."""
        if self._stream is None:
            return Arrived()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


@dataclass(frozen=True, slots=True)
class QueuedDigests:
    """Digests that a device is making."""

    bases: Keys
    sums: Tensor
    """On the host. They mean nothing before `arrival`."""
    arrival: Arrival

    def ready(self) -> bool:
        """Whether they are on the host. Never waits; raises what the device raised."""
        return self.arrival.query()

    def take(self) -> tuple[int, ...]:
        """Waits for them unless they are ready."""
        self.arrival.synchronize()
        return tuple(mixed(self.bases + self.sums.numpy().view(np.uint64)).tolist())


class DeviceDigests:
    """Makes digests of signed `words` [num_pages, words of a page] on their device. What it launches is compiled."""

    def __init__(self, words: Tensor, layout: PageLayout) -> None:
        self._words = words
        self._layout = layout
        self._queue = DeviceQueue(words.device)
        self._warm_up()

    def queue(self, kind: DigestKind, pages: Indices, keys: Keys, tail: int, heads: range) -> QueuedDigests:
        """Of these heads of `pages`. `tail`: slots in use of the last page, or 0 when it is full like the others."""
        queue, bases = self._queue, mixed(keys)
        table = queue.host_memory(4, len(pages))
        rows = table.numpy()
        rows[digest_triton.PAGES] = pages
        rows[digest_triton.BASES] = bases.view(np.int64)
        rows[digest_triton.USED] = self._layout.slots
        rows[digest_triton.SUMS] = 0
        if tail:
            rows[digest_triton.USED, -1] = tail
        sums = queue.host_memory(len(pages))
        with queue.on():
            there = table.to(queue.device, non_blocking=True, copy=True)
            if len(pages):
                self._launch(kind, there, heads)
            sums.copy_(there[digest_triton.SUMS], non_blocking=True)
            arrival = queue.record()
        return QueuedDigests(bases, sums, arrival)

    def _launch(self, kind: DigestKind, table: Tensor, heads: range) -> None:
        if kind is DigestKind.SAMPLED:
            digest_triton.add_samples(self._words, table, self._layout, heads)
        elif heads == range(self._layout.heads):
            digest_triton.add_words(self._words, table)
        else:
            part = gathered(self._words, table[digest_triton.PAGES], self._layout, heads)
            torch.arange(table.shape[1], out=table[digest_triton.PAGES])
            digest_triton.add_words(part, table)

    def _warm_up(self) -> None:
        """No transfer waits for a compiler: digest a page as any peer may share it.

        A kernel is compiled for whether words are a multiple of 16, as those of a page and of some of its heads may be
        or not (`digest_triton.full_kernel`).
        """
        page, heads, page_words = np.zeros(1, np.int64), self._layout.heads, self._words.shape[1]
        self.queue(DigestKind.SAMPLED, page, page.view(np.uint64), 0, range(heads))
        parts = {page_words // heads * count % 16 == 0: range(count) for count in range(1, heads + 1)}
        for part in parts.values():
            self.queue(DigestKind.FULL, page, page.view(np.uint64), 0, part)
