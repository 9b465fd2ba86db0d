"""Node 0's side of an engine on several nodes: membership, settings that must agree, and liveness.

    1. listens   on the port of `--dist-init-addr`, with the deployment's keys; a thread replies
    2. gathers   every node asks to join, once a second, with its settings. A node whose settings differ is rejected,
                 and so is a second process of a node that is there. Nothing has been loaded yet
    3. begins    all are here: each starts its ranks, which form their groups through the store on this node
    4. watches   a node that reports a loss, or is silent for `SILENCE_S`, ends the engine: the failure is recorded,
                 local ranks end with it, and rank 0 leaves (`rank_processes`)
    5. ends      nodes learn from the reply to their next heartbeat that it is over, and why

Ranks run in lock-step: one that pages, batches or drafts differently from rank 0 would make all of them wait forever.
So settings are compared before anything is loaded, and the error names the difference. The address of the leader is one
of the settings, so a node of another engine is rejected too.

Everything between nodes except tensors (membership, the addresses of groups, heartbeats) uses ZMQ with the deployment's
CURVE keys, to one port of node 0. Off loopback nothing of it works without keys [private-channels].

A node that vanishes (power, network) leaves connections that never break, and a collective on them cannot be
interrupted. A rank 0 that still runs `LEAVE_S` after a failure is therefore killed.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from torch._C._distributed_c10d import HashStore, Store

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.errors import RankLostError
from tandem_engine.base.release import product_version
from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.ipc.channels import IpcContext, Poller, RouterChannel
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.nodes import (
    BeatAnswer,
    JoinAnswer,
    JoinNode,
    LeaderToNode,
    NodeBeat,
    NodeLost,
    NodeToLeader,
    StoreAnswer,
    StoreCall,
)
from tandem_engine.parallel.group import Departure, FirstFailure
from tandem_engine.parallel.node_store import answer_call


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAccess:
    """Of this node."""

    host: str = LOOPBACK
    """Address that the other nodes reach this one at: its groups listen there and nowhere else."""
    curve_keys: Path | None = None
    """Key file of the deployment."""

    def open(self) -> IpcContext:
        """A context that checks keys. Raises `ConfigError` when `host` is no loopback address and there are none."""
        context = IpcContext(None if self.curve_keys is None else KeyPair.load(self.curve_keys))
        try:
            context.require_keys_off_loopback(self.host)
        except Exception:
            context.close()
            raise
        return context


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank meets those of other nodes, as part of its `RankOrder`."""

    endpoint: str
    """Of the leader."""
    session: str
    host: str
    curve_keys: str | None

    @property
    def access(self) -> NodeAccess:
        return NodeAccess(host=self.host, curve_keys=None if self.curve_keys is None else Path(self.curve_keys))


OWN = frozenset({"model_path", "threads", "cpus", "operation", "parallel.node_rank", "speculative.draft_model_path"})
"""Of each node: where files lie there, how many cores it has, and which node it is."""


def settings_of(config: EngineConfig, fingerprint: str) -> dict[str, str]:
    """By name. `fingerprint` is the checkpoint's."""
    stated = dict(_flat("", msgspec.to_builtins(config)))
    return {**stated, "checkpoint": fingerprint, "tandem": product_version(), "torch": str(torch.__version__)}


def difference(leader: Mapping[str, str], node: Mapping[str, str]) -> str | None:
    """The first setting that differs, in one clause; None if none does."""
    for name in sorted({*leader, *node}):
        here, there = leader.get(name, "nothing"), node.get(name, "nothing")
        if here != there:
            return f"{name} is {there} there and {here} on node 0"
    return None


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if path in OWN:
        return
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}" if path else str(name), inner)
    else:
        yield path, msgspec.json.encode(value).decode()


logger = logging.getLogger(__name__)

TURN_S = 0.2
"""At most between looks for silent nodes; messages are answered at once."""

BEAT_S = 1.0

SILENCE_S = 30.0
"""A node that says nothing for so long is lost, and so is a leader. Loading may hold Python up for seconds."""

LEAVE_S = 10.0

FAREWELL_S = 2 * BEAT_S
"""How long the leader stays to tell the nodes that it is over."""

LOST_STATUS = 3
"""Exit status of an engine that lost a rank, as `engine.process` has it."""


@dataclass(kw_only=True, slots=True)
class Member:
    """A node that has come."""

    member: str
    received_at: float


def follows_key(rank: int) -> str:
    """Set in the store by a rank that is about to take its first turn."""
    return f"follows-{rank}"


@dataclass(kw_only=True)
class Leader:
    """What node 0 knows of the others. One thread calls `answer` and `look`; any may call the rest."""

    parallel: ParallelConfig
    settings: Mapping[str, str]
    self_test: bool
    failure: FirstFailure
    departure: Departure
    clock: Callable[[], float] = time.monotonic
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    store: HashStore = field(default_factory=HashStore)
    members: dict[int, Member] = field(default_factory=dict)
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    lost: threading.Event = field(default_factory=threading.Event)
    cause: str | None = None
    """Why a node is lost, by its own words or its silence."""
    _notified: set[int] = field(default_factory=set)
    """Nodes that have been notified of the end, or reported it themselves."""
    _failed_at: float | None = None

    def answer(self, message: NodeToLeader) -> LeaderToNode | None:
        """The answer to the sender of `message`."""
        match message:
            case JoinNode():
                return self._join(message)
            case NodeBeat():
                return self._beat(message)
            case NodeLost():
                self._lose(message)
                return None
            case StoreCall():
                if message.session != self.session:
                    return StoreAnswer(nonce=message.nonce, refused="the engine that this rank belongs to is over")
                return answer_call(message, self.store)

    def look(self) -> bool:
        """Notice silence, at least once a second. True when rank 0 should be gone by now and is not."""
        now = self.clock()
        if self.begun.is_set() and not self.over.is_set():
            for node_rank, member in self.members.items():
                silent = now - member.received_at
                if silent > SILENCE_S:
                    self._record(f"no heartbeat of node {node_rank} for {silent:.0f} s")
        if self.failure.error is None or self.over.is_set():
            return False
        self._failed_at = now if self._failed_at is None else self._failed_at
        return now - self._failed_at > LEAVE_S

    def missing(self) -> list[int]:
        """Nodes that are not here."""
        now = self.clock()
        return [
            node_rank
            for node_rank in range(1, self.parallel.nnodes)
            if node_rank not in self.members or now - self.members[node_rank].received_at > SILENCE_S
        ]

    @property
    def all_notified(self) -> bool:
        """All nodes know that it is over."""
        return len(self._notified) >= self.parallel.nnodes - 1

    def _join(self, message: JoinNode) -> JoinAnswer:
        refusal = self._refusal(message)
        if refusal is not None:
            logger.warning("rejected node %d: %s", message.node_rank, refusal)
            return JoinAnswer(session=self.session, refused=refusal)
        known = self.members.get(message.node_rank)
        if known is None or known.member != message.member:
            logger.info("node %d of %d joined", message.node_rank, self.parallel.nnodes)
        self.members[message.node_rank] = Member(member=message.member, received_at=self.clock())
        if not self.missing():
            self.begun.set()
        return JoinAnswer(session=self.session, begin=self.begun.is_set(), self_test=self.self_test)

    def _refusal(self, message: JoinNode) -> str | None:
        if not 1 <= message.node_rank < self.parallel.nnodes:
            return f"the other nodes are 1 to {self.parallel.nnodes - 1}, not {message.node_rank}"
        differing = difference(self.settings, message.settings)
        if differing is not None:
            return f"node {message.node_rank} would not compute what node 0 does: {differing}"
        known = self.members.get(message.node_rank)
        if self.begun.is_set() and known is not None and known.member != message.member:
            # Its ranks are gone with the process that had them.
            self._record(f"node {message.node_rank} has started again")
            return f"node {message.node_rank} was here before and is part of a running engine, which ends now"
        return None

    def _beat(self, message: NodeBeat) -> BeatAnswer:
        known = self.members.get(message.node_rank)
        if message.session != self.session or known is None or known.member != message.member:
            return BeatAnswer(session=self.session, ended=True, reason="node 0 leads another engine now")
        known.received_at = self.clock()
        if message.leaving:
            self.departure.ask(f"node {message.node_rank} is to leave")
        if self.over.is_set() or self.failure.error is not None:
            self._notified.add(message.node_rank)
            return BeatAnswer(session=self.session, ended=True, reason=str(self.failure.error or ""))
        keys = [follows_key(rank) for rank in self.parallel.ranks_of(message.node_rank)]
        return BeatAnswer(session=self.session, serving=self.store.check(keys))

    def _lose(self, message: NodeLost) -> None:
        if message.session == self.session:
            self._notified.add(message.node_rank)
            self._record(f"node {message.node_rank}: {message.reason}")

    def _record(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.failure.record(RankLostError(cause))
        self.lost.set()


def leave(status: int) -> NoReturn:
    """End the process at once. What it has logged is written, within `FLUSH_S`: nothing else says why."""
    logging.shutdown()
    os._exit(status)


@dataclass(kw_only=True)
class LeaderServer:
    """The leader's socket and thread."""

    leader: Leader
    context: IpcContext
    channel: "RouterChannel[NodeToLeader, LeaderToNode]"
    abandon: Callable[[int], object] = leave
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    @classmethod
    def open(cls, leader: Leader, access: NodeAccess) -> "LeaderServer":
        """Listen and answer. Raises `ConfigError` when the port is taken, or keys are wanting."""
        context = access.open()
        try:
            channel: RouterChannel[NodeToLeader, LeaderToNode] = RouterChannel(
                context, access.host, leader.parallel.init_address.port, inbound=NodeToLeader, outbound=LeaderToNode
            )
        except Exception:
            context.close()
            raise
        return cls(leader=leader, context=context, channel=channel)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="node-leader", daemon=True)
        self._thread.start()

    def gather(self) -> None:
        """Return when all nodes are here. Raises `RankLostError` when one does not come in time."""
        leader, limit = self.leader, self.leader.parallel.init_timeout
        logger.info("waiting for %d more nodes at %s", leader.parallel.nnodes - 1, self.channel.endpoint)
        if not leader.begun.wait(limit):
            missing = ", ".join(map(str, leader.missing()))
            raise RankLostError(
                f"node {missing} of {leader.parallel.nnodes} has not come to {leader.parallel.dist_init_addr} within "
                f"{limit:g} s; does it run, and with the same --curve-keys? Raise --dist-init-timeout if it needs more"
            )

    def close(self) -> None:
        """Notify the nodes that it is over, as far as they still ask, and stop answering."""
        self.leader.over.set()
        deadline = time.monotonic() + FAREWELL_S
        while self.leader.begun.is_set() and not self.leader.all_notified and time.monotonic() < deadline:
            time.sleep(TURN_S / 4)
        self._closed.set()
        self._thread.join()
        self.channel.drain(TURN_S)
        self.context.close()

    def _run(self) -> None:
        poller = Poller([self.channel.socket])
        while not self._closed.is_set():
            poller.wait(TURN_S)
            for identity, message in self.channel.receive():
                answer = self.leader.answer(message)
                if answer is not None:
                    self.channel.send(identity, answer)
            if self.leader.look():
                logger.error("rank 0 is stuck in a step; ending the engine: %s", self.leader.failure.error)
                self.abandon(LOST_STATUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """What rank 0 needs to know of other nodes."""

    leader: Leader
    meeting: Meeting
    """For the ranks that node 0 starts."""

    @property
    def store(self) -> Store:
        return self.leader.store

    @property
    def failure(self) -> FirstFailure:
        return self.leader.failure

    @property
    def departure(self) -> Departure:
        return self.leader.departure

    def cause(self) -> str | None:
        """The reason that a node reported for its end. Waits a moment for it: connections break first."""
        self.leader.lost.wait(BEAT_S)
        return self.leader.cause


@contextmanager
def gathered_nodes(
    config: EngineConfig, fingerprint: str, access: NodeAccess, *, self_test: bool
) -> Iterator[Gathered]:
    """Wait for all nodes of the engine; on leaving they learn that it is over. On node 0, before anything is loaded.

    Raises:
        ConfigError: the address cannot be listened on, or keys are wanting.
        RankLostError: a node did not come within `--dist-init-timeout`.
    """
    leader = Leader(
        parallel=config.parallel,
        settings=settings_of(config, fingerprint),
        self_test=self_test,
        failure=FirstFailure(),
        departure=Departure(),
    )
    server = LeaderServer.open(leader, access)
    keys = None if access.curve_keys is None else str(access.curve_keys)
    try:
        server.gather()
        meeting = Meeting(endpoint=server.channel.endpoint, session=leader.session, host=access.host, curve_keys=keys)
        yield Gathered(leader=leader, meeting=meeting)
    except Exception as error:
        leader.failure.record(RankLostError(f"node 0 gave up: {error}"))
        raise
    finally:
        server.close()
