"""The links from this engine to its peers: identity, speed, and problems.

    1. met        the worker service has named the peer; the first self-test starts after a random delay, so that the
                  workers of a rollout do not all write at once. The peer may have sent its `Hello`, and have been
                  written to, long before: it sends one `Hello`, whether or not it has been named here
    2. measured   a self-test (`link_probe`) has given bytes per second and latency, and the `Hello`s of both sides
                  the transport; every push of a request updates the rate
    3. silent     after `REPEAT_S` without pushes the self-test is repeated
    4. over       the peer is fenced, or no longer named

A test without a result is repeated sooner. An engine whose peers were never named does nothing here.

`LinkRate` is bytes over seconds of recent writes. A self-test sets it, pushes update it. Both sums decay by the bytes
and the time added to them, so a fast link is rated by its last tens of MiB and a slow one by its last seconds.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Self

from tandem_engine.base.clock import Clock
from tandem_engine.base.names import LinkTransport, PageId
from tandem_engine.base.recording import recording
from tandem_engine.config import DisaggConfig
from tandem_engine.disaggregation.base import StageHost
from tandem_engine.disaggregation.holds import HoldTable
from tandem_engine.disaggregation.link_probe import LinkProber, ProbeResult, ProbeTargets
from tandem_engine.disaggregation.peers import MAX_CHANNELS, PeerEvent, PeerLink
from tandem_engine.disaggregation.transport import (
    Digests,
    KvTransport,
    PushDone,
    PushFailed,
    TransportEvent,
    condition_of,
    transport_between,
)
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.stats import LinkReport
from tandem_engine.messages.transfer import DrainAck, Hello, ProbeGrant, ProbeRefusal, ProbeRequest, TransferAborted

FADE_BYTES = 64 << 20

FADE_S = 2.0
"""After so many further bytes, or so long a time of writing, what was before counts a third."""

MIN_SHARE = 0.5
"""Of a push's time that is put down to its bytes, however short it was against the latency."""


@dataclass(kw_only=True, slots=True)
class LinkRate:
    """Moving average of one link."""

    latency_s: float = 0.0
    """Of a write of one page; 0 until measured."""
    changed_at: float | None = None
    """Monotonic time of the last figure."""
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0 until measured."""
        return self._bytes / self._seconds if self._seconds > 0.0 else 0.0

    @recording
    def measured(self, *, size: int, seconds: float, latency_s: float, now: float) -> None:
        """A self-test wrote `size` bytes in `seconds`: it replaces what was known."""
        self.latency_s = latency_s
        self._bytes = self._seconds = 0.0
        self.pushed(size=size, seconds=seconds, now=now)

    @recording
    def pushed(self, *, size: int, seconds: float, now: float) -> None:
        """A push wrote `size` bytes in `seconds`, its latency included."""
        if size <= 0 or not seconds > 0.0:
            return
        writing = max(seconds - self.latency_s, MIN_SHARE * seconds)
        kept = math.exp(-size / FADE_BYTES - writing / FADE_S)
        self._bytes = kept * self._bytes + size
        self._seconds = kept * self._seconds + writing
        self.changed_at = now


logger = logging.getLogger(__name__)
FIRST_WITHIN_S = 3.0

RETRY_S = 10.0
"""After a test that gave no figure: a refusal, no answer, a failed write."""

REPEAT_S = 600.0
"""After the last figure, be it a test's or a push's."""

JITTER = 0.5
"""Retries and repetitions come up to this share later."""


@dataclass(kw_only=True, slots=True)
class Link:
    """From here to one incarnation."""

    peer: Peer
    due: float
    """Monotonic time of the next self-test."""
    rate: LinkRate = field(default_factory=LinkRate)
    transport: LinkTransport = LinkTransport.UNKNOWN
    broken: bool = False
    condition: str = ""
    problem: str = ""

    def report(self, now: float) -> LinkReport:
        rate = self.rate
        return LinkReport(
            peer=self.peer.incarnation,
            bytes_per_s=_rounded(rate.bytes_per_s),
            latency_s=_rounded(rate.latency_s),
            transport=self.transport,
            age_s=0.0 if rate.changed_at is None else round(now - rate.changed_at, 1),
            broken=self.broken,
            condition=self.condition,
            problem=self.problem,
        )


@dataclass(kw_only=True, slots=True)
class Links:
    """All links of an engine. Scheduler thread only."""

    transport: KvTransport
    clock: Clock
    config: DisaggConfig
    random: Random
    targets: ProbeTargets
    prober: LinkProber = field(init=False)
    _links: dict[str, Link] = field(default_factory=dict)
    _transports: dict[str, LinkTransport] = field(default_factory=dict)
    """To each peer that has sent a Hello, named or not; the oldest makes room for the next."""

    @classmethod
    def build(
        cls, *, host: StageHost, transport: KvTransport, peers: PeerLink, config: DisaggConfig, page_bytes: int
    ) -> Self:
        """With no peers yet."""
        holds = HoldTable(clock=host.clock, give_back=host.memory.give_back, drain_timeout=config.drain_timeout)
        links = cls(
            transport=transport,
            clock=host.clock,
            config=config,
            random=Random(peers.me.incarnation),
            targets=ProbeTargets(host=host, transport=transport, peers=peers, holds=holds),
        )
        links.prober = LinkProber(
            host=host,
            transport=transport,
            peers=peers,
            clock=host.clock,
            page_bytes=page_bytes,
            most_pages=max(1, (config.link_probe_mib << 20) // page_bytes),
            listener=links,
        )
        return links

    def meet(self, peers: Iterable[Peer]) -> None:
        """These are the peers from now on."""
        named = {peer.incarnation: peer for peer in peers}
        for gone in self._links.keys() - named.keys():
            del self._links[gone]
        # In the order of their naming, on every rank of an engine [same-collectives]: a set has another order in each
        # process.
        for incarnation in [incarnation for incarnation in named if incarnation not in self._links]:
            due = self.clock.now() + self.random.uniform(0.0, FIRST_WITHIN_S)
            self._links[incarnation] = link = Link(peer=named[incarnation], due=due)
            self._carried_by(link, self._transports.get(incarnation, LinkTransport.UNKNOWN))

    def tick(self) -> None:
        """Let time pass: begin and give up self-tests."""
        self.targets.tick()
        self.prober.tick()
        if self._links and self.config.link_probe_mib and not self.prober.busy:
            first = min(self._links.values(), key=lambda link: link.due)
            if self.clock.now() >= first.due:
                self._defer(first, RETRY_S)
                self.prober.start(first.peer)

    def pushed(self, incarnation: str, *, size: int, seconds: float) -> None:
        """A request's push of `size` bytes to this peer took `seconds`."""
        link = self._links.get(incarnation)
        if link is not None:
            link.rate.pushed(size=size, seconds=seconds, now=self.clock.now())
            link.broken = False
            if link.rate.latency_s:
                self._defer(link, REPEAT_S)

    def failed(self, incarnation: str) -> None:
        """A request's push found that the peer cannot be reached."""
        link = self._links.get(incarnation)
        if link is not None and not link.broken:
            link.broken = True
            self._defer(link, RETRY_S)

    def on_peer(self, event: PeerEvent) -> bool:
        """Take a peer's message about a self-test. False: it concerns others, or others too."""
        match event:
            case ProbeRequest():
                self.targets.on_request(event)
            case ProbeGrant():
                self.prober.on_grant(event)
            case ProbeRefusal():
                self.prober.on_refusal(event)
            case DrainAck():
                return self.targets.on_ack(event)
            case TransferAborted():
                return self.prober.on_abort(event)
            case Hello():
                self._on_hello(event)
                return False
            case _:
                return False
        return True

    def on_transport(self, event: TransportEvent) -> bool:
        """Take what the transport reports about a self-test. False: it concerns others."""
        match event:
            case PushDone():
                return self.prober.on_push_done(event)
            case PushFailed():
                return self.prober.on_push_failed(event)
            case Digests():
                return False

    def probe_done(self, peer: Peer, result: ProbeResult) -> None:
        link = self._links.get(peer.incarnation)
        if link is None:
            return
        link.rate.measured(size=result.size, seconds=result.seconds, latency_s=result.latency_s, now=self.clock.now())
        link.broken, link.problem = False, ""
        self._defer(link, REPEAT_S)
        logger.info(
            "link to %s: %.2f GB/s, %.2f ms for one page, by %s",
            peer.incarnation,
            link.rate.bytes_per_s / 1e9,
            1e3 * result.latency_s,
            link.transport,
        )

    def probe_failed(self, peer: Peer, reason: str, *, broken: bool) -> None:
        link = self._links.get(peer.incarnation)
        if link is None:
            return
        if link.problem != reason:
            logger.info("cannot measure link to %s: %s", peer.incarnation, reason)
        link.problem, link.broken = reason, broken or link.broken
        self._defer(link, RETRY_S)

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced. Idempotent."""
        self._links.pop(incarnation, None)
        self._transports.pop(incarnation, None)
        self.prober.peer_gone(incarnation)
        self.targets.holds.fence(incarnation)

    def reports(self) -> tuple[LinkReport, ...]:
        now = self.clock.now()
        return tuple(link.report(now) for link in self._links.values())

    def held_pages(self) -> Iterator[PageId]:
        """Scratch pages of self-tests, at either end (audit)."""
        return chain(self.prober.held_pages(), self.targets.holds.held_pages())

    def _on_hello(self, hello: Hello) -> None:
        incarnation = hello.sender.incarnation
        if incarnation not in self._transports and len(self._transports) >= MAX_CHANNELS:
            del self._transports[next(iter(self._transports))]
        self._transports[incarnation] = transport_between(self.transport.hello(), hello)
        link = self._links.get(incarnation)
        if link is not None:
            self._carried_by(link, self._transports[incarnation])

    def _carried_by(self, link: Link, transport: LinkTransport) -> None:
        link.transport = transport
        condition = condition_of(transport, self.config.expect_transport)
        if condition and condition != link.condition:
            logger.warning("link to %s: %s; check UCX_TLS and the devices of both", link.peer.incarnation, condition)
        link.condition = condition

    def _defer(self, link: Link, seconds: float) -> None:
        link.due = self.clock.now() + seconds * (1.0 + self.random.uniform(0.0, JITTER))


def _rounded(value: float) -> float:
    """To three significant digits: more would be noise, and long in a registry."""
    return float(f"{value:.3g}")
