"""Prefix fetches, both ends: what is cached at one engine is brought to another that is about to compute it.

    who computes (PrefixFetcher)                       who has it (PrefixLender)

    pages, a hold, PrefixAsk with the grant   ──────▶  longest cached prefix of the tokens, locked
                                              ◀══════  pages by NIXL WRITE
    digests compared, pages into the cache    ◀──────  PrefixRecord; unlocked
    the rest is computed

Any engine does both, so the KV of an answer goes back from the worker that generated it, for the next turn of its
conversation, in just this way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from tandem_engine.disaggregation.holds import HoldTable
from tandem_engine.disaggregation.peers import PeerEvent
from tandem_engine.disaggregation.prefill import PrefillStage
from tandem_engine.disaggregation.prefix_counters import PrefixCounters
from tandem_engine.disaggregation.prefix_fetcher import PrefixFetcher
from tandem_engine.disaggregation.prefix_lender import PrefixLender
from tandem_engine.disaggregation.transport import Digests, PushDone, PushFailed, TransportEvent
from tandem_engine.messages.requests import HandoffSide
from tandem_engine.messages.transfer import (
    DrainAck,
    GrantsRenewed,
    PrefixAsk,
    PrefixRecord,
    StillOpen,
    TransferAborted,
)
from tandem_engine.names import PageId


@dataclass(kw_only=True, slots=True)
class Prefixes:
    """Tells apart what concerns which end."""

    fetcher: PrefixFetcher
    lender: PrefixLender
    counters: PrefixCounters

    @classmethod
    def build(cls, stage: PrefillStage) -> Self:
        """Beside `stage`, which answers for all pushes of the engine."""
        host, config, counters = stage.host, stage.config, PrefixCounters()
        holds = HoldTable(clock=host.clock, give_back=host.memory.give_back, drain_timeout=config.drain_timeout)
        fetcher = PrefixFetcher(
            host=host,
            transport=stage.transport,
            peers=stage.peers,
            config=config,
            page_bytes=stage.page_bytes,
            holds=holds,
            counters=counters,
        )
        lender = PrefixLender(
            host=host,
            transport=stage.transport,
            peers=stage.peers,
            drains=stage.drains,
            closed=stage.closed,
            clocks=stage.clocks,
            max_pages=stage.max_pages,
            counters=counters,
            role=config.role,
        )
        return cls(fetcher=fetcher, lender=lender, counters=counters)

    def on_peer(self, event: PeerEvent) -> bool:
        """Take what a peer says about a fetch. False: it concerns others, or others too."""
        match event:
            case PrefixAsk():
                self.lender.on_ask(event)
            case PrefixRecord():
                self.fetcher.on_record(event)
            case DrainAck():
                return self.fetcher.on_ack(event)
            case TransferAborted(side=HandoffSide.SEND):
                return self.fetcher.on_abort(event)
            case _:
                self._overhear(event)
                return False
        return True

    def _overhear(self, event: PeerEvent) -> None:
        """What concerns others as well."""
        match event:
            case StillOpen(side=HandoffSide.SEND):
                self.fetcher.on_still_open(event)
            case GrantsRenewed():
                self.lender.on_renewed(event)
            case TransferAborted():
                self.lender.on_abort(event)

    def on_transport(self, event: TransportEvent) -> bool:
        """Take what the transport reports about a fetch. False: it concerns others, or others too."""
        match event:
            case PushDone():
                self.lender.on_push_done(event)
            case PushFailed():
                self.lender.on_push_failed(event)
            case Digests():
                return self.fetcher.on_digests(event)
        return False

    def tick(self) -> None:
        """Let time pass."""
        self.lender.tick()
        self.fetcher.tick()

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced. Idempotent."""
        self.lender.peer_gone(incarnation)
        self.fetcher.peer_gone(incarnation)

    def forget_kv(self) -> None:
        """The prefix cache is about to be emptied."""
        self.lender.forget_kv()
        self.fetcher.forget_kv()

    def held_pages(self) -> Iterator[PageId]:
        """Pages on their way here (audit)."""
        return self.fetcher.held_pages()

    def holds_for_a_while(self) -> bool:
        """Whether pages are on their way, or lent."""
        return self.fetcher.holds.open_transfers() > 0 or bool(self.lender.loans)
