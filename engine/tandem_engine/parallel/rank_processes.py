"""The ranks of a node, started, watched and ended by one process: rank 0, or a follower node.

    1. started     `tandem-engine rank` with its `RankOrder` on standard input, which then stays open: when it closes,
                   rank 0 is gone and the rank leaves, however rank 0 came to its end
    2. met         all have joined the store (a file in their `meeting_place`, or between nodes that of
                   `parallel.node_store`) and formed their groups
    3. following   each does what rank 0 does, iteration by iteration
    4. ended       `Stop` was agreed on: they leave by themselves, and are killed if they do not
       or lost     one ended before that, or this rank failed: the rest is killed at once, so that no rank waits in a
                   collective for one that will not come, and the engine ends with `RankLostError`

`meeting_place` is a directory of this user alone. Rank 0 makes it, and removes it when its engine closes. If rank 0 was
killed, the other ranks remove it when they detect that.
"""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import FileStore, Store

from tandem_engine.base.errors import RankLostError
from tandem_engine.base.logs import configured_format
from tandem_engine.config import EngineConfig
from tandem_engine.ipc.channels import CallChannel
from tandem_engine.ipc.private_tmpdir import own_folder
from tandem_engine.messages.nodes import LeaderToNode, NodeToLeader
from tandem_engine.parallel.group import FirstFailure, Parallel, device_of_rank
from tandem_engine.parallel.node_leader import Gathered, Meeting
from tandem_engine.parallel.node_store import RemoteStore
from tandem_engine.parallel.torch_group import join_ranks

PREFIX = "tandem-ranks-"


def meeting_place() -> AbstractContextManager[Path]:
    """See `own_folder`."""
    return own_folder(PREFIX)


logger = logging.getLogger(__name__)
POLL_S = 0.05

LAST_WORDS_S = 1.0
"""How long a rank that breaks off may take to end by itself, and so to say why, before it is killed."""

STOP_S = 10.0
"""How long ranks may take to leave after `Stop`."""

COMMAND = (sys.executable, "-m", "tandem_engine.cli", "rank")


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is to be. Rank 0 writes it to the rank's standard input, as one line of JSON."""

    engine: EngineConfig
    rank: int
    folder: str
    self_test: bool
    """Rank 0 will run the self-test before its first turn."""
    meeting: Meeting | None = None
    """Of an engine on several nodes."""

    def open_store(self) -> Store:
        """Where this rank meets the others, for as long as its process lives. Rank 0 of several nodes has its own."""
        if self.meeting is not None:
            channel: CallChannel[LeaderToNode, NodeToLeader] = CallChannel(
                self.meeting.access.open(), self.meeting.endpoint, inbound=LeaderToNode, outbound=NodeToLeader
            )
            return RemoteStore(channel, session=self.meeting.session)
        return FileStore(str(Path(self.folder) / "store"), self.engine.parallel.tp_size)

    @property
    def error_file(self) -> Path:
        """Where a rank that cannot continue writes the reason."""
        return Path(self.folder) / f"rank-{self.rank}.error"


def announce(store: Store, rank: int) -> None:
    """Notify rank 0 that this rank runs and is about to join."""
    store.set(_here_key(rank), "1")


def _here_key(rank: int) -> str:
    return f"here-{rank}"


@dataclass(kw_only=True, slots=True)
class RankProcess:
    """One rank."""

    order: RankOrder
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, order: RankOrder) -> "RankProcess":
        command = [*COMMAND, "--log-format", configured_format().value]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None, "standard input is a pipe"
        # One that ended already is noticed by its status.
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()
        return cls(order=order, process=process)

    def lost(self) -> str | None:
        """How it ended, when it did so without an order."""
        status = self.process.poll()
        if not status:
            return None
        ending = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        error_file = self.order.error_file
        words = f": {error_file.read_text('utf-8', 'replace')}" if error_file.is_file() else ""
        return f"rank {self.order.rank} {ending}{words}"

    def end(self, *, deadline: float) -> None:
        """Wait until `deadline` (monotonic seconds) for it to end; then end it."""
        assert self.process.stdin is not None, "standard input is a pipe"
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # What it has not read of its order would be sent once more.
        with suppress(BrokenPipeError):
            self.process.stdin.close()


@dataclass(kw_only=True, slots=True)
class RankProcesses:
    """Those of a node that are processes of this one. `watch` runs on a thread of its own."""

    ranks: Sequence[RankProcess]
    failure: FirstFailure
    done: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)
    """Set when `watch` has ended them after a failure."""
    cause: str | None = None
    """How the rank that broke off ended, once `watch` has seen it."""
    grace_s: float = 0.0
    """How long they may take to leave in the end."""

    def watch(self) -> None:
        """Until `done`: notice the end of a rank, and end the others after a failure of any."""
        deadline = None
        while not self.done.wait(POLL_S):
            self.cause = next((lost for rank in self.ranks if (lost := rank.lost()) is not None), None)
            if self.cause is not None:
                self.failure.record(RankLostError(self.cause))
            if self.failure.error is not None:
                deadline = deadline or time.monotonic() + LAST_WORDS_S
                if self.cause is not None or time.monotonic() > deadline:
                    try:
                        self.end(grace_s=0.0)
                    finally:
                        # Rank 0 waits for it without a bound.
                        self.failed.set()
                    return

    def end(self, *, grace_s: float) -> None:
        """Wait for all ranks to end, together no longer than `grace_s`; then end them. Idempotent."""
        deadline = time.monotonic() + grace_s
        for rank in self.ranks:
            rank.end(deadline=deadline)


@contextmanager
def started(orders: Sequence[RankOrder], failure: FirstFailure) -> Iterator[RankProcesses]:
    """Start ranks, watch them, and end them on leaving."""
    ranks = RankProcesses(ranks=[RankProcess.start(order) for order in orders], failure=failure)
    watcher = threading.Thread(target=ranks.watch, name="rank-watcher", daemon=True)
    watcher.start()
    try:
        yield ranks
    finally:
        ranks.done.set()
        watcher.join()
        ranks.end(grace_s=ranks.grace_s)


@contextmanager
def other_ranks(config: EngineConfig, *, self_test: bool, gathered: Gathered | None = None) -> Iterator[Parallel]:
    """Start the ranks that `config` asks for on this node besides this one, and end them on leaving.

    Use it around everything that uses the `Parallel` it gives: `load`, `Engine.build`, and the engine's life.

    Args:
        self_test: the engine will run its self-test, in which all ranks must take part.
        gathered: the other nodes, of an engine that has several.

    Raises:
        RankLostError: a rank could not start, or ended early; the message says why.
    """
    if config.parallel.tp_size == 1:
        yield Parallel()
        return
    failure = FirstFailure() if gathered is None else gathered.failure
    meeting = None if gathered is None else gathered.meeting
    with meeting_place() as folder:
        orders = [
            RankOrder(engine=config, rank=rank, folder=str(folder), self_test=self_test, meeting=meeting)
            for rank in config.parallel.ranks_of(0)
        ]
        with started(orders[1:], failure) as ranks:
            try:
                store = orders[0].open_store() if gathered is None else gathered.store
                parallel = _meet(store, orders[0], failure)
                yield parallel if gathered is None else replace(parallel, departure=gathered.departure)
                ranks.grace_s = STOP_S
            except RankLostError as error:
                failure.record(error)
                ranks.failed.wait()
                cause = ranks.cause or (None if gathered is None else gathered.cause())
                raise RankLostError(cause or str(error)) from error


def _meet(store: Store, order: RankOrder, failure: FirstFailure) -> Parallel:
    parallel = order.engine.parallel
    _await_arrival(store, order.engine, failure)
    return join_ranks(
        store,
        rank=order.rank,
        size=parallel.tp_size,
        device=torch.device(device_of_rank(order.engine.device, parallel.local_rank(order.rank))),
        timeout_s=parallel.timeout,
        failure=failure,
        host=None if order.meeting is None else order.meeting.host,
    )


def _await_arrival(store: Store, config: EngineConfig, failure: FirstFailure) -> None:
    """Return when every rank has come to the store. Raises `RankLostError` when one does not."""
    timeout_s = config.parallel.timeout
    deadline = time.monotonic() + timeout_s
    for rank in range(1, config.parallel.tp_size):
        while not store.check([_here_key(rank)]):
            failure.raise_if_any()
            if time.monotonic() > deadline:
                raise RankLostError(f"rank {rank} did not start within {timeout_s:g} s; raise --dist-timeout")
            time.sleep(POLL_S)
