"""The other end of a transfer, played by a test line by line."""

from dataclasses import dataclass

from tandem_engine.base.names import DigestKind, PageId
from tandem_engine.disaggregation.digest import PageDigester
from tandem_engine.disaggregation.transport import Push, PushKey
from tandem_engine.memory.pool import KvPool
from tandem_engine.messages.requests import HandoffSide, Peer
from tandem_engine.messages.transfer import (
    DrainAck,
    GrantsRenewed,
    HandoffRecord,
    Hello,
    OpenRoom,
    PeerMessage,
    StillOpen,
    TransferAborted,
    WriteGrant,
)
from tandem_testing.disagg_network import M, MemoryLink, PeerNetwork
from tandem_testing.fake_executor import make_fake_pool
from tandem_testing.fake_transport import FakeFabric, FakeTransport
from tandem_testing.scheduler_builders import ManualClock

PAGE_SIZE = 4


@dataclass(kw_only=True)
class ScriptedPeer:
    """An engine without a scheduler."""

    me: Peer
    other: Peer
    """The engine under test."""
    link: MemoryLink
    transport: FakeTransport
    pool: KvPool
    clock: ManualClock
    """The engine's own, so that its knowledge of ours is easily sent."""
    filled: int = 0
    """Tokens of `fill`."""

    def send(self, message: PeerMessage) -> None:
        self.link.send(self.other, message)

    def got(self, kind: type[M]) -> list[M]:
        """What the engine under test has sent of one kind, so far."""
        return [event for event in self.link.inbox if isinstance(event, kind)]

    def greet(self) -> None:
        self.send(self.transport.hello())

    def abort(self, side: HandoffSide, room: str, *, generation: int = 1, finished: bool = False) -> None:
        self.send(
            TransferAborted(
                room=room,
                generation=generation,
                sender=self.me,
                side=side,
                reason="scripted",
                finished=finished,
            )
        )

    def keepalive(self, side: HandoffSide, *rooms: OpenRoom, sent_at: float = 0.0) -> None:
        """A sign of life."""
        self.send(StillOpen(sender=self.me, side=side, sent_at=sent_at, rooms=rooms))

    # As a writer

    def learn_pools(self) -> None:
        """Connect to every pool that was announced."""
        for hello in self.got(Hello):
            self.transport.connect(hello)

    def grant(self) -> WriteGrant:
        """The newest grant that was received."""
        return self.got(WriteGrant)[-1]

    def fill(self, tokens: tuple[int, ...]) -> None:
        """Compute: page i + 1 of our pool holds tokens [4i, 4i + 4) as the fake model writes them."""
        self.filled = len(tokens)
        keys, values = self.pool.key_value(0)
        for position, token in enumerate(tokens):
            page, slot = 1 + position // PAGE_SIZE, position % PAGE_SIZE
            keys[page, :, slot] = token
            values[page, :, slot] = position

    def write(self, grant: WriteGrant, first: int = 0, count: int | None = None) -> None:
        """Push pages [first, first + count) of the grant; they arrive with the fabric's next tick."""
        count = len(grant.pages) - first if count is None else count
        self.transport.push(
            Push(
                key=PushKey(room=grant.room, generation=grant.generation, first=first, count=count),
                peer=self.other.incarnation,
                source=self._sources(grant)[first : first + count],
                target=tuple(PageId(page) for page in grant.pages[first : first + count]),
            )
        )

    def record(self, grant: WriteGrant, token: int, **changed: object) -> None:
        """The account of a complete transfer."""
        digests = (
            PageDigester(self.pool)
            .begin(
                self._sources(grant),
                room=grant.room,
                generation=grant.generation,
                first=0,
                tail=self.filled % PAGE_SIZE,
            )
            .take()
        )
        fields: dict[str, object] = {
            "room": grant.room,
            "generation": grant.generation,
            "sender": self.me,
            "first_token": grant.first_token,
            "pages": len(grant.pages),
            "digests": digests,
            "output_ids": (token,),
            "logprobs": None,
            "cached_tokens": 0,
        }
        self.send(HandoffRecord(**{**fields, **changed}))

    def ack(self, room: str, *, generation: int = 1) -> None:
        self.send(DrainAck(room=room, generation=generation, sender=self.me))

    def _sources(self, grant: WriteGrant) -> tuple[PageId, ...]:
        start = 1 + grant.first_token // PAGE_SIZE
        return tuple(PageId(start + i) for i in range(len(grant.pages)))

    # As a receiver

    def show_clock(self) -> None:
        """Answer a question that was never asked: the engine knows what our clock says from now on."""
        self.renew(sent_at=self.clock.now(), valid_s=0.0)

    def allow(
        self,
        room: str,
        pages: tuple[int, ...],
        *,
        first_token: int = 0,
        generation: int = 1,
        valid_s: float = 8.0,
        granted_at: float | None = None,
        dated: bool = True,
    ) -> None:
        """A grant from now unless `granted_at` says otherwise; not `dated`: the engine knows nothing of our clock."""
        if dated:
            self.show_clock()
        self.send(
            WriteGrant(
                room=room,
                generation=generation,
                sender=self.me,
                writer=self.other.incarnation,
                first_token=first_token,
                pages=pages,
                granted_at=self.clock.now() if granted_at is None else granted_at,
                valid_s=valid_s,
                digest=DigestKind.SAMPLED,
            )
        )

    def renew(self, *rooms: str, sent_at: float, valid_s: float = 8.0, generation: int = 1) -> None:
        named = tuple(OpenRoom(room, generation, granted=True) for room in rooms)
        now = self.clock.now()
        self.send(GrantsRenewed(sender=self.me, sent_at=sent_at, answered_at=now, valid_s=valid_s, rooms=named))

    def tokens_at(self, pages: tuple[int, ...], count: int) -> list[int]:
        """What lies in our pool at `pages`, read as the fake model reads it."""
        keys, _ = self.pool.key_value(0)
        return keys[list(pages)].view(-1)[:count].tolist()


def make_scripted_peer(
    me: Peer,
    other: Peer,
    *,
    fabric: FakeFabric,
    network: PeerNetwork,
    clock: ManualClock,
    num_pages: int = 17,
    num_layers: int = 1,
) -> ScriptedPeer:
    pool = make_fake_pool(num_pages=num_pages, page_size=PAGE_SIZE, num_layers=num_layers)
    transport = fabric.join(me, pool, ManualClock())
    return ScriptedPeer(me=me, other=other, link=network.join(me), transport=transport, pool=pool, clock=clock)
