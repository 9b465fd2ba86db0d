"""All nodes of an engine, gathered around node 0 for as long as it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from tandem_engine.config import EngineConfig
from tandem_engine.errors import RankLostError
from tandem_engine.parallel.failure import Departure, FirstFailure
from tandem_engine.parallel.nodes.access import Meeting, NodeAccess
from tandem_engine.parallel.nodes.leader import BEAT_S, Leader, LeaderDesk
from tandem_engine.parallel.nodes.settings import settings_of


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
        """What a node has said about its end. Waits a moment for it: connections break first."""
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
    desk = LeaderDesk.open(leader, access)
    keys = None if access.curve_keys is None else str(access.curve_keys)
    try:
        desk.gather()
        meeting = Meeting(endpoint=desk.channel.endpoint, session=leader.session, host=access.host, curve_keys=keys)
        yield Gathered(leader=leader, meeting=meeting)
    except Exception as error:
        leader.failure.record(RankLostError(f"node 0 gave up: {error}"))
        raise
    finally:
        desk.close()
