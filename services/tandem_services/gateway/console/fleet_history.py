"""The last hour of the fleets of a gateway, for the curves of the console.

It records while the console is used: from the first look at its data until an hour after the last one. A gateway
without viewers computes and keeps nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tandem_engine.base.clock import Clock
from tandem_services.gateway.console.fleet_document import FleetDocument
from tandem_services.router.row_values import Figures

PERIOD_S = 5.0
KEPT_S = 3600.0
MAX_SAMPLES = int(KEPT_S / PERIOD_S)


class HistorySample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All workers at one time. None: not known."""

    time: float
    """Unix seconds."""
    running: int
    queued: int
    output: float
    """Tokens per second."""
    hits: float | None
    """Share of the prompt tokens since the last sample that were cached."""
    kv: float | None
    """Share of the pages in use."""
    ttft: float | None
    moved: float
    """Bytes of KV per second since the last sample."""


class HistoryDocument(msgspec.Struct, frozen=True, kw_only=True):
    period_s: float
    samples: list[HistorySample]


class _Totals(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    moved_bytes: int

    @staticmethod
    def of(figures: Figures) -> "_Totals":
        return _Totals(figures.prompt_tokens_total, figures.cached_tokens_total, figures.transfer_bytes_total)


@dataclass(kw_only=True, slots=True)
class FleetHistory:
    """Belongs to the event loop of its gateway."""

    look: Callable[[], FleetDocument]
    clock: Clock
    _samples: deque[HistorySample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    _totals: dict[str, _Totals] = field(default_factory=dict)
    """Of the last sample, by incarnation."""
    _sampled_at: float = 0.0
    _viewed_at: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def viewed(self) -> None:
        """Call at each look at the console's data: recording begins, or continues for an hour."""
        self._viewed_at = self.clock.now()
        if self._timer is None:
            self._sample()

    def document(self) -> HistoryDocument:
        """Oldest first."""
        return HistoryDocument(period_s=PERIOD_S, samples=[*self._samples])

    def _sample(self) -> None:
        """Takes one and plans the next, unless the last look was too long ago."""
        now = self.clock.now()
        if now - self._viewed_at > KEPT_S:
            self._timer = None
            self._samples.clear()
            self._totals.clear()
            return
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._sample)
        document = self.look()
        figures = {row.incarnation: row.figures for row in document.workers if row.figures is not None}
        totals = {incarnation: _Totals.of(each) for incarnation, each in figures.items()}
        self._samples.append(self._summary(document, [*figures.values()], totals, now - self._sampled_at))
        self._totals, self._sampled_at = totals, now

    def _summary(
        self, document: FleetDocument, figures: list[Figures], totals: dict[str, _Totals], passed_s: float
    ) -> HistorySample:
        # Of workers that were there before: totals of a new one are from its start.
        pairs = [(self._totals[name], total) for name, total in totals.items() if name in self._totals]
        prompt = sum(new.prompt_tokens - old.prompt_tokens for old, new in pairs)
        cached = sum(new.cached_tokens - old.cached_tokens for old, new in pairs)
        moved = sum(new.moved_bytes - old.moved_bytes for old, new in pairs)
        return HistorySample(
            time=document.time,
            running=sum(each.running + each.transferring for each in figures),
            queued=sum(each.waiting for each in figures) + document.gateway.waiting,
            output=sum(each.output_tokens_per_s for each in figures),
            hits=cached / prompt if prompt > 0 else None,
            kv=_share_in_use(figures),
            ttft=document.gateway.traffic.ttft_p50_s,
            moved=moved / passed_s if passed_s > 0 else 0.0,
        )


def _share_in_use(figures: Sequence[Figures]) -> float | None:
    pages = sum(each.total_pages for each in figures)
    unused = sum(each.free_pages + each.evictable_pages + each.quarantined_pages for each in figures)
    return max(0, pages - unused) / pages if pages else None
