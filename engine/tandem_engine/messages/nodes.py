"""Messages of the nodes (machines) of one engine to the node that leads them, and its replies.

    JoinNode     "I am node 1, with these settings"   ─▶  JoinAnswer     not all are here · begin · rejected
    NodeBeat     once a second from then on           ─▶  BeatAnswer     continue · it is over
    NodeLost     exit message                             no reply
    StoreCall    of a rank: the store of its groups   ─▶  StoreAnswer

A session is one start of the leader. Messages of another session are rejected, so an engine that ended cannot affect
the next one at the same address.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Settings = Annotated[dict[Name, Text], msgspec.Meta(max_length=1024)]


class JoinNode(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Repeated until the answer says `begin`."""

    node_rank: int
    member: Name
    """This process of the node, and no other."""
    settings: Settings
    """All that must be equal on every node."""


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """This node lives."""

    session: Name
    node_rank: int
    member: Name
    leaving: bool = False
    """It was asked to leave: the engine should drain, and end."""


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """This node cannot continue."""

    session: Name
    node_rank: int
    reason: Text


class StoreAction(StrEnum):
    """As methods of torch's `Store`, but none of them waits."""

    SET = "set"
    GET = "get"
    ADD = "add"
    CHECK = "check"
    DELETE = "delete"


class StoreCall(msgspec.Struct, frozen=True, kw_only=True, tag="store"):
    session: Name
    nonce: int
    action: StoreAction
    keys: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)]
    """One, but for CHECK."""
    value: bytes = b""
    """For SET."""
    amount: int = 0
    """For ADD."""


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="joining"):
    session: Name
    begin: bool = False
    """All nodes are here: start the ranks, and beat from now on."""
    refused: Text = ""
    """Why this node can never be one of the engine's. One sentence for the operator."""
    self_test: bool = False
    """Every rank takes part in a self-test before its first turn."""


class BeatAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="beaten"):
    session: Name
    serving: bool = False
    """All ranks of the node follow rank 0."""
    ended: bool = False
    """The engine is over, in order or not: this node has nothing more to do."""
    reason: Text = ""
    """Why, when not in order."""


class StoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    nonce: int
    found: bool = True
    """GET: the key is there. CHECK: all of them are. DELETE: it was."""
    value: bytes = b""
    amount: int = 0
    """Of ADD: the sum."""
    refused: Text = ""
    """This store belongs to another engine."""


NodeToLeader = JoinNode | NodeBeat | NodeLost | StoreCall
LeaderToNode = JoinAnswer | BeatAnswer | StoreAnswer
