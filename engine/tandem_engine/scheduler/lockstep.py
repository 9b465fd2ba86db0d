"""How inputs reach a scheduler: at once if it is the only rank, else in the same iteration on every rank.

    rank 0     submit ─▶ pending ─┐                               ┌─▶ apply ─▶ step
                                  ├─ agree, once per iteration ───┤
    others                  none ─┘                               └─▶ apply ─▶ step

Every scheduler starts from the same state, applies the same inputs in the same iterations, reads the same time and
gets the same results, so all plan the same batches. A rank whose forward failed reports it before the next iteration:
the others may be waiting for it inside a collective, and only its exit releases them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import RankLostError
from tandem_engine.base.names import RequestId
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
from tandem_engine.messages.requests import CloseSession, Peer
from tandem_engine.messages.transfer import PeerMessage
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import FirstFailure
from tandem_engine.parallel.inputs import (
    Add,
    EngineInput,
    FromPeer,
    Input,
    LoadWeights,
    LosePeer,
    Meet,
    PeerInput,
    Stop,
)
from tandem_engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class LoadsWeights(Protocol):
    """The part of the model that inputs concern."""

    def start(self, path: str) -> None:
        """Begin to load the checkpoint in the folder `path`."""
        ...


class ChangesAdapters(Protocol):
    """The engine's adapters, as far as inputs concern them."""

    def start(self, order: LoadAdapter | UnloadAdapter) -> None:
        """Begin to carry out an operator's order."""
        ...


class PeerAware(Protocol):
    """The engine's transfers, as far as inputs concern them."""

    def on_peer_message(self, message: PeerMessage) -> None:
        """A peer has spoken; handle it in this turn."""
        ...

    def peer_gone(self, incarnation: str) -> None:
        """The peer is fenced. Idempotent."""
        ...

    def peer_ended(self, incarnation: str) -> None:
        """And its process has ended. Idempotent."""
        ...

    def meet(self, peers: Sequence[Peer]) -> None:
        """These are the peers from now on."""
        ...


class Inputs(Protocol):
    """The way in. The owner of the loop submits, and calls `begin_turn` before each step of the scheduler."""

    weights: LoadsWeights | None
    """Set by the owner of the model."""
    adapters: ChangesAdapters | None
    """Set by the owner of the model."""
    peers: PeerAware | None
    """Set by the owner of the transfers."""

    @property
    def pending(self) -> bool:
        """Something was submitted that the scheduler has not seen."""
        ...

    def submit(self, item: Input) -> None:
        """Have `item` happen to the scheduler, in order of submission."""
        ...

    def begin_turn(self) -> bool:
        """Bring the scheduler up to date. False when the engine stops: no step may follow."""
        ...

    def stop(self) -> None:
        """The engine closes. Idempotent; after a failure no other rank is notified."""
        ...

    def check(self) -> None:
        """During a long wait: raise `RankLostError` when the step that is waited for can no longer come."""
        ...


@dataclass(kw_only=True, slots=True)
class DirectInputs:
    """Implements `Inputs` for a scheduler that is alone."""

    scheduler: Scheduler
    weights: LoadsWeights | None = None
    adapters: ChangesAdapters | None = None
    peers: PeerAware | None = None

    @property
    def pending(self) -> bool:
        return False

    def submit(self, item: Input) -> None:
        apply(self.scheduler, item, weights=self.weights, adapters=self.adapters, peers=self.peers)

    def begin_turn(self) -> bool:
        return True

    def stop(self) -> None:
        """No other rank has to be notified."""

    def check(self) -> None:
        """There is no other rank."""


@dataclass(kw_only=True, slots=True)
class AgreedClock:
    """Implements `Clock`: the time of the current turn by rank 0's clock, the same on all ranks."""

    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass(kw_only=True, slots=True)
class AgreedInputs:
    """Implements `Inputs` for one of several ranks. Only rank 0 submits."""

    scheduler: Scheduler
    agreement: Agreement
    clock: AgreedClock
    """The scheduler's."""
    local_clock: Clock
    rank: int
    failure: FirstFailure
    weights: LoadsWeights | None = None
    adapters: ChangesAdapters | None = None
    peers: PeerAware | None = None
    stopped: bool = False
    queue: list[Input] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        return bool(self.queue)

    def submit(self, item: Input) -> None:
        self.queue.append(item)

    def begin_turn(self) -> bool:
        """See `Inputs.begin_turn`. Other ranks than 0 wait here for the next turn.

        Raises:
            RankLostError: a forward of this rank has failed, or another rank has ended.
        """
        self.failure.raise_if_any()
        submitted, self.queue = self.queue, []
        try:
            turn = self.agreement.agree(now=self.local_clock.now(), inputs=submitted)
        except RankLostError as error:
            self.failure.record(error)
            raise
        self.clock.time = turn.now
        for item in turn.inputs:
            if isinstance(item, Stop):
                self.stopped = True
                return False
            apply(self.scheduler, item, weights=self.weights, adapters=self.adapters, peers=self.peers)
        return True

    def stop(self) -> None:
        """Rank 0 stops the others with it; another rank stops alone, because rank 0 has notified it."""
        if self.stopped or self.failure.error is not None or self.rank != 0:
            return
        self.queue = [Stop()]
        try:
            self.begin_turn()
        except RankLostError as error:
            logger.warning("cannot notify the other ranks to stop: %s", error)

    def check(self) -> None:
        self.failure.raise_if_any()


def apply(
    scheduler: Scheduler,
    item: Input,
    *,
    weights: LoadsWeights | None = None,
    adapters: ChangesAdapters | None = None,
    peers: PeerAware | None = None,
) -> None:
    """Apply `item` to `scheduler`, or to the model, its adapters or the transfers."""
    if isinstance(item, PeerInput):
        if peers is not None:
            _apply_to_peers(peers, item)
    elif isinstance(item, LoadAdapter | UnloadAdapter):
        assert adapters is not None, f"adapter {item.name!r} for a scheduler without a model"
        adapters.start(item)
    else:
        _apply_to_engine(scheduler, item, weights)


def _apply_to_peers(peers: PeerAware, item: PeerInput) -> None:
    match item:
        case FromPeer():
            peers.on_peer_message(item.message)
        case LosePeer(ended=False):
            peers.peer_gone(item.incarnation)
        case LosePeer():
            peers.peer_ended(item.incarnation)
        case Meet():
            peers.meet(item.peers)


def _apply_to_engine(scheduler: Scheduler, item: EngineInput, weights: LoadsWeights | None) -> None:
    match item:
        case Add():
            scheduler.add(item.message, item.client)
        case AbortRequests():
            _abort(scheduler, item)
        case CloseSession():
            scheduler.sessions.close(item.cache_salt, item.session)
        case PauseGeneration():
            scheduler.pause(item.mode, refuse_new=item.refuse_new)
        case ResumeGeneration():
            scheduler.resume()
        case FlushCache():
            scheduler.forget_kv()
        case LoadWeights():
            assert weights is not None, f"weights in {item.path} for a scheduler without a model"
            weights.start(item.path)
        case Drain():
            scheduler.drain()
        case DecodeElsewhere():
            scheduler.decode_elsewhere(wanted=item.wanted, within_s=item.within_s)
        case Stop():
            raise AssertionError("Stop ends the turns and is no business of the scheduler")


def _abort(scheduler: Scheduler, item: AbortRequests) -> None:
    if item.rid is not None:
        scheduler.abort(RequestId(item.rid))
    elif item.client is not None:
        scheduler.abort_client(item.client)
    else:
        scheduler.abort_all()
