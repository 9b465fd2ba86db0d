"""External inputs of a scheduler, as messages that rank 0 sends to the other ranks.

Everything that changes a scheduler and does not follow from its own state is one of these. A rank that missed one, or
received it an iteration later, would plan another batch, and the next collective would hang [same-collectives].
"""

import msgspec

from tandem_engine.messages.control import (
    AbortRequests,
    DecodeElsewhere,
    Drain,
    FlushCache,
    LoadAdapter,
    PauseGeneration,
    ResumeGeneration,
    UnloadAdapter,
)
from tandem_engine.messages.requests import CloseSession, GenerateRequest, Peer
from tandem_engine.messages.transfer import PeerMessage


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    message: GenerateRequest
    client: bytes


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True, tag="load_weights"):
    """Each rank its part of the checkpoint in this folder, to serve it once all have theirs."""

    path: str


class FromPeer(msgspec.Struct, frozen=True, kw_only=True, tag="from_peer"):
    """What another engine says about a transfer. Rank 0 alone has a socket for it."""

    message: PeerMessage


class LosePeer(msgspec.Struct, frozen=True, kw_only=True, tag="lose_peer"):
    """This incarnation is fenced."""

    incarnation: str
    ended: bool = False
    """Its process has ended, too: nothing can be in the middle of a write."""


class Meet(msgspec.Struct, frozen=True, kw_only=True, tag="meet"):
    """These are the peers from now on."""

    peers: tuple[Peer, ...]


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The engine closes: no turn follows."""


EngineInput = (
    Add
    | AbortRequests
    | CloseSession
    | PauseGeneration
    | ResumeGeneration
    | FlushCache
    | LoadWeights
    | Drain
    | DecodeElsewhere
    | Stop
)
"""Commands and the end of a session are broadcast as they came."""

PeerInput = FromPeer | LosePeer | Meet
"""Of an engine that transfers KV alone."""

Input = EngineInput | LoadAdapter | UnloadAdapter | PeerInput
