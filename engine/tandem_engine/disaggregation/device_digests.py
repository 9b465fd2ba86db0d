"""Digests of pages on a device, queued at once and fetched later.

    host      a table of pages, bases and slots in use, in pinned memory
    queued    table to the device ─▶ one kernel, which adds to the table's sums ─▶ sums to pinned memory ─▶ event
    later     `ready` queries the event, `take` mixes bases and sums

Nothing waits for the device: the caller transfers pages in the meantime, and looks. The stream is ahead of others, so
a digest does not wait until a whole step has been computed; between two kernels of a step there is room for it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem_engine.base.names import DigestKind
from tandem_engine.disaggregation import digest_triton
from tandem_engine.disaggregation.digest_words import gathered, mixed
from tandem_engine.disaggregation.packed_pages import Arrival, queue_of
from tandem_engine.kernels.cpu.page_digests import Indices, Keys
from tandem_engine.memory.pool import PageLayout


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
        self._queue = queue_of(words.device)
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
