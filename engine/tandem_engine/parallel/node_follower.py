"""A node that is not the first: its ranks are child processes of this one, which represents them to the leader.

1. joins     sends its settings once a second, until the leader replies that all nodes are here, rejects it, or
             `--dist-init-timeout` is over
2. starts    its ranks, which join all others through the leader's store
3. beats     a heartbeat once a second, until the leader replies that the engine is over
   or ends   with `RankLostError`: one of its ranks ended, or the leader was silent for `SILENCE_S`. Then its ranks
             are killed, wherever they wait, and the supervisor of nodes restarts this one
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem_engine.base.errors import ConfigError, RankLostError
from tandem_engine.config import EngineConfig
from tandem_engine.ipc.channels import CallChannel
from tandem_engine.messages.nodes import (
    BeatAnswer,
    JoinAnswer,
    JoinNode,
    LeaderToNode,
    NodeBeat,
    NodeLost,
    NodeToLeader,
)
from tandem_engine.parallel.group import FirstFailure
from tandem_engine.parallel.node_leader import BEAT_S, SILENCE_S, Meeting, NodeAccess
from tandem_engine.parallel.rank_processes import STOP_S, RankOrder, RankProcesses, meeting_place, started

logger = logging.getLogger(__name__)
ANSWER_S = BEAT_S


@dataclass(kw_only=True)
class Follower:
    """One node's end. `follow` once."""

    config: EngineConfig
    access: NodeAccess
    settings: Mapping[str, str]
    report: Callable[[bool], None]
    """Called about once a second, after joining only while the leader answers: whether the ranks follow rank 0."""
    member: str = field(default_factory=lambda: secrets.token_hex(16))
    leaving: threading.Event = field(default_factory=threading.Event)
    """Set it to have the engine drained and ended."""

    def follow(self) -> None:
        """Return when the engine has ended in order.

        Raises:
            ConfigError: the leader refuses this node.
            RankLostError: the leader did not come, or is gone, or a rank is.
        """
        parallel = self.config.parallel
        context = self.access.open()
        try:
            channel: CallChannel[LeaderToNode, NodeToLeader] = CallChannel(
                context, parallel.init_address.endpoint, inbound=LeaderToNode, outbound=NodeToLeader
            )
            try:
                joined = self._join(channel)
                with self._ranks(joined) as ranks:
                    self._beat(channel, joined.session, ranks)
            finally:
                channel.close()
        finally:
            context.close()

    def _join(self, channel: "CallChannel[LeaderToNode, NodeToLeader]") -> JoinAnswer:
        parallel = self.config.parallel
        deadline = time.monotonic() + parallel.init_timeout
        request = JoinNode(node_rank=parallel.node_rank, member=self.member, settings=dict(self.settings))
        answered = False
        while time.monotonic() < deadline and not self.leaving.is_set():
            channel.send(request)
            answer = channel.receive(ANSWER_S)
            self.report(False)
            if not isinstance(answer, JoinAnswer):
                continue
            if answer.refused:
                raise ConfigError(f"node 0 at {parallel.dist_init_addr} refuses this node: {answer.refused}")
            answered = True
            if answer.begin:
                return answer
            self.leaving.wait(BEAT_S)
        if self.leaving.is_set():
            raise RankLostError("stopped before the engine had started")
        why = "has not seen all nodes" if answered else "does not answer; does it run, and with the same --curve-keys?"
        raise RankLostError(
            f"node {parallel.node_rank} waited {parallel.init_timeout:g} s for node 0 at {parallel.dist_init_addr}, "
            f"which {why}"
        )

    @contextmanager
    def _ranks(self, joined: JoinAnswer) -> Iterator[RankProcesses]:
        parallel = self.config.parallel
        keys = self.access.curve_keys
        meeting = Meeting(
            endpoint=parallel.init_address.endpoint,
            session=joined.session,
            host=self.access.host,
            curve_keys=None if keys is None else str(keys),
        )
        with meeting_place() as folder:
            orders = [
                RankOrder(
                    engine=self.config, rank=rank, folder=str(folder), self_test=joined.self_test, meeting=meeting
                )
                for rank in parallel.ranks_of(parallel.node_rank)
            ]
            with started(orders, FirstFailure()) as ranks:
                yield ranks

    def _beat(self, channel: "CallChannel[LeaderToNode, NodeToLeader]", session: str, ranks: RankProcesses) -> None:
        node_rank = self.config.parallel.node_rank
        received_at = time.monotonic()
        while True:
            beat = NodeBeat(session=session, node_rank=node_rank, member=self.member, leaving=self.leaving.is_set())
            channel.send(beat)
            answer = channel.receive(ANSWER_S)
            if isinstance(answer, BeatAnswer):
                received_at = time.monotonic()
                if answer.ended:
                    self._end(ranks, answer.reason)
                    return
                self.report(answer.serving)
            if ranks.failure.error is not None:
                reason = ranks.cause or str(ranks.failure.error)
                channel.send(NodeLost(session=session, node_rank=node_rank, reason=reason))
                raise RankLostError(reason)
            if time.monotonic() - received_at > SILENCE_S:
                raise RankLostError(f"no heartbeat of node 0 for {SILENCE_S:g} s")
            ranks.failed.wait(BEAT_S)

    def _end(self, ranks: RankProcesses, reason: str) -> None:
        if reason:
            raise RankLostError(f"the engine is over: {reason}")
        # `Stop` was agreed on: they leave by themselves.
        ranks.grace_s = STOP_S
