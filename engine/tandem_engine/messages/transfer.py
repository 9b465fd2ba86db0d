"""Engine ↔ engine: the control half of a KV transfer. The pages themselves go by NIXL.

    decode                         prefill
      │ Hello(metadata, pool) ───────▶ │   once per pair of incarnations
      │ WriteGrant(pages)     ───────▶ │   may arrive before, during or after the computation
      │                    ◀── NIXL WRITE of one or more pushes
      │ StillOpen(rooms)    ◀────────▶ │   every quarter of a lease, while either side continues with rooms; more often
      │                                │   of grants whose end the receiver lacks: the writer repeats its last message
      │ GrantsRenewed(rooms)  ───────▶ │   answers the writer's, for the rooms that have a grant; asked for at once when
      │                                │   a grant cannot be dated yet, or lay unread for long
      │ ◀─────────────── HandoffRecord │   first token, logprobs, digests: after the last push is done
      │ TransferAborted ◀────────────▶ │   either way, on every terminal path [abort-both-ways]
      │ ◀──────────────────── DrainAck │   the writer will not touch the granted pages again [late-write]

    any worker                     any other
      │ Hello, ProbeRequest   ───────▶ │   now and then, to measure the link
      │ ◀─ Hello, ProbeGrant or ProbeRefusal
      │ NIXL WRITEs, then DrainAck ──▶ │

    requester: has the prompt      source: has a prefix of it cached
      │ Hello, PrefixAsk(grant) ─────▶ │
      │              ◀── NIXL WRITE    │
      │ ◀──────────────── PrefixRecord │   how many of the granted pages, and their digests
      │ TransferAborted ◀────────────▶ │   as above, and so is the DrainAck that follows one

Every message names the sender's incarnation, and the room (or rooms) with the generation.

Where layers keep states (`memory.state_pool`), these are one more group of layers: `groups` of a `Hello`, of a
`WriteGrant` and of a `HandoffRecord` are for states what the other fields are for pages. Engines without states leave
them out.
"""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tandem_engine.base.names import DigestKind, LinkTransport
from tandem_engine.messages.outputs import CacheHits, TokenLogprob
from tandem_engine.messages.requests import HandoffSide, Peer

MAX_OPEN_ROOMS = 1024
"""Rooms that one message may name; a side with more open ones sends several."""

MachineName = Annotated[str, msgspec.Meta(max_length=128)]
TransportNames = Annotated[tuple[LinkTransport, ...], msgspec.Meta(max_length=8)]

MAX_RANKS = 64
"""Ranks of one engine."""

MAX_GROUPS = 15
"""Of layers, next to those whose K and V are pages."""

STATES = 1
"""The group of layers that keep states. Pages are group 0."""


class GroupPool(msgspec.Struct, frozen=True, kw_only=True):
    """Where a further group of layers has its slots: slot s starts at `address + s * slot_bytes`."""

    address: int
    slot_bytes: int
    num_slots: int
    layout: Annotated[str, msgspec.Meta(max_length=256)]
    """What the bytes of a slot are. Both sides of a transfer have the same."""


class GroupGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Where to write what one sequence leaves in a further group of layers."""

    group: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)]
    slots: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=1)]


class GroupDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Of what was written there."""

    group: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUPS)]
    digests: tuple[int, ...]


GroupPools = Annotated[tuple[GroupPool, ...], msgspec.Meta(max_length=MAX_GROUPS)]
GroupGrants = Annotated[tuple[GroupGrant, ...], msgspec.Meta(max_length=MAX_GROUPS)]
DigestsOfGroups = Annotated[tuple[GroupDigests, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class RankPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of one of several ranks, where it is not like rank 0's."""

    nixl_metadata: bytes
    pool_address: int
    device_id: int
    first_head: int
    """Of the model's KV heads; `Hello.heads` of them lie there from this one on."""
    groups: GroupPools | UnsetType = UNSET
    """As `Hello.groups`."""


RankPools = Annotated[tuple[RankPool, ...], msgspec.Meta(max_length=MAX_RANKS)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What a writer needs to reach the sender's pool, or the pools of its ranks: each has some heads of every page."""

    sender: Peer
    nixl_metadata: bytes
    pool_address: int
    """Address of page 0; page p starts at `pool_address + p * page_bytes`."""
    page_bytes: int
    num_pages: int
    heads: int
    """KV heads in a page."""
    device: str
    """DRAM or VRAM."""
    device_id: int
    machine: MachineName = ""
    """Equal for processes that can share memory; "" if that is not known."""
    transports: TransportNames = ()
    """Of `LinkTransport`, those that the sender's process could use."""
    ranks: RankPools = ()
    """Of an engine with several, all of them in order; what is absent here they have in common. Else none."""
    groups: GroupPools | UnsetType = UNSET
    """Further groups of layers, from group 1 on."""
    unpacks: bool = False
    """Whether the sender unpacks slices that come as one run per page (`disaggregation.packed_pages`)."""

    @property
    def num_ranks(self) -> int:
        """Of the sender's engine, at least 1."""
        return max(1, len(self.ranks))


class WriteGrant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """The receiver allows `writer` to write KV of one prompt into `pages`."""

    room: str
    generation: int
    sender: Peer
    writer: str
    """Incarnation that may write."""
    first_token: int
    """First prompt position the receiver lacks: a page multiple. Page i holds tokens from there on."""
    pages: tuple[int, ...]
    granted_at: float
    """By the sender's own clock. The writer knows what that is by its own, or asks (`disaggregation.grants`)."""
    valid_s: float
    """Seconds from then for which the grant is good; the writer starts no push after that."""
    digest: DigestKind
    """The proof that the receiver will ask for."""
    adapter: bytes = b""
    """Digest of the adapter that the KV shall be of, b"" for the base model. The writer gives up where its own differs,
    so no engine takes KV of another one."""
    groups: GroupGrants | UnsetType = UNSET
    """For what the whole prompt, or the prefix that is sent, leaves in further groups of layers, whatever the receiver
    has of its pages."""


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, tag="handoff"):
    """All pages are written. The receiver commits when every digest matches."""

    room: str
    generation: int
    sender: Peer
    first_token: int
    """Prompt position where the pushed pages start, as granted."""
    pages: int
    digests: tuple[int, ...]
    """One unsigned 64-bit digest per pushed page."""
    output_ids: tuple[int, ...]
    """The token(s) sampled by the sender after the prompt: position resume_len onwards."""
    logprobs: tuple[TokenLogprob, ...] | None
    cached_tokens: int
    cache_hits: CacheHits | None = None
    """Of `cached_tokens`, of senders that say so."""
    exposed_s: float = 0.0
    """What the transfer took beyond the computation: from the end of the prompt's last step to this record."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """Of the sender. A page's digest is made of those of what each has written to each rank of the receiver."""
    groups: DigestsOfGroups | UnsetType = UNSET
    """Of each that was granted, in order."""
    packed: bool = False
    """Whether slices came as one run per page each: to a receiver that `unpacks` alone."""
    ended_by_grammar: bool = False
    """The last of `output_ids` completes the grammar, which allows nothing more: the receiver ends the output."""


class TransferAborted(msgspec.Struct, frozen=True, kw_only=True, tag="transfer_aborted"):
    """The sender of this message is done with the room. `finished`: the output ended with the first token."""

    room: str
    generation: int
    sender: Peer
    side: HandoffSide
    """Which end of the handoff the sender of this message is."""
    reason: str
    finished: bool = False


class DrainAck(msgspec.Struct, frozen=True, kw_only=True, tag="drain_ack"):
    """The writer has no push outstanding in this room and will start none."""

    room: str
    generation: int
    sender: Peer


class OpenRoom(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at one transfer, in messages that name many."""

    room: str
    generation: int
    granted: bool = False
    """SEND: the sender of the message has a write grant for it. RECEIVE: it has given one and lacks word of the end."""
    written: int = 0
    """Pages that it has written so far."""


OpenRooms = Annotated[tuple[OpenRoom, ...], msgspec.Meta(max_length=MAX_OPEN_ROOMS)]


class StillOpen(msgspec.Struct, frozen=True, kw_only=True, tag="still_open"):
    """The sender is alive and continues with these rooms: the other side may still get what it waits for."""

    sender: Peer
    side: HandoffSide
    """SEND: prompts to compute or to push. RECEIVE: requests that wait for memory, and grants whose end it lacks."""
    sent_at: float = msgspec.field(name="said_at")
    """By the sender's own clock, and for it alone: the answer repeats it unread [one-clock]."""
    rooms: OpenRooms


class GrantsRenewed(msgspec.Struct, frozen=True, kw_only=True, tag="grants_renewed"):
    """The receiver holds the granted pages of these rooms for longer."""

    sender: Peer
    sent_at: float = msgspec.field(name="said_at")
    """Of the `StillOpen` that this answers."""
    answered_at: float
    """By the sender's own clock."""
    valid_s: float
    """Seconds from `sent_at` for which the grants are good."""
    rooms: OpenRooms


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="probe_request"):
    """The sender would like to measure its link: may it write to a few pages that are not needed now?"""

    room: str
    sender: Peer
    pages: Annotated[int, msgspec.Meta(ge=1)]
    """No more than these."""


class ProbeGrant(msgspec.Struct, frozen=True, kw_only=True, tag="probe_grant"):
    """It may. The writer says `DrainAck` when it is through, whatever became of it."""

    room: str
    sender: Peer
    writer: str
    """Incarnation that may write."""
    pages: tuple[int, ...]
    valid_s: float
    """Seconds from receipt after which no push may start."""


class ProbeRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="probe_refusal"):
    """Not now."""

    room: str
    sender: Peer
    reason: str


class PrefixAsk(msgspec.Struct, frozen=True, kw_only=True, tag="prefix_ask"):
    """The sender is about to compute a prompt: would the writer send what it has cached of it?"""

    grant: WriteGrant
    """Into pages for the tokens from `grant.first_token` on."""
    tokens: bytes
    """All tokens up to the end of the granted pages, packed as `block_hash.pack_tokens` does. Matching compares tokens,
    so what is sent is what was asked for."""
    salt: str
    """Of the cache entries; others are not looked at."""
    adapter: bytes = b""
    """Digest of the adapter that computed them, b"" for the base model. With the salt, their `CacheSpace`. The grant
    repeats it, and so does the record: a writer of a release that ignores adapters is found out by that."""

    @property
    def sender(self) -> Peer:
        return self.grant.sender


class PrefixRecord(msgspec.Struct, frozen=True, kw_only=True, tag="prefix_record"):
    """The first `pages` granted pages were written, and nothing more will be."""

    room: str
    generation: int
    sender: Peer
    pages: int
    """Fewer than were granted when the rest is not cached any more."""
    digests: tuple[int, ...]
    """One unsigned 64-bit digest per written page."""
    adapter: bytes = b""
    """Of the request for the prefix."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """As in `HandoffRecord`."""
    groups: DigestsOfGroups | UnsetType = UNSET
    """Of what the prefix left in further groups of layers after its last page, unless no page was written."""
    packed: bool = False
    """As in `HandoffRecord`."""


ProbeMessage = ProbeRequest | ProbeGrant | ProbeRefusal
HandoffMessage = WriteGrant | HandoffRecord | TransferAborted | DrainAck | StillOpen | GrantsRenewed
PeerMessage = Hello | HandoffMessage | ProbeMessage | PrefixAsk | PrefixRecord
