"""What node 0 makes of the others' messages, in time that does not pass by itself."""

from dataclasses import replace

import pytest

from tandem_engine.base.errors import RankLostError
from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.messages.nodes import (
    BeatAnswer,
    JoinAnswer,
    JoinNode,
    NodeBeat,
    NodeLost,
    StoreAction,
    StoreCall,
)
from tandem_engine.parallel.group import Departure, FirstFailure
from tandem_engine.parallel.node_leader import LEAVE_S, SILENCE_S, Leader, difference, follows_key, settings_of

PARALLEL = ParallelConfig(tp_size=6, nnodes=3, dist_init_addr="leader:5757")
CONFIG = EngineConfig(model_path="/models/a", parallel=PARALLEL)
SETTINGS = settings_of(CONFIG, "f1")


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def leader(time) -> Leader:
    return Leader(
        parallel=PARALLEL,
        settings=SETTINGS,
        self_test=True,
        failure=FirstFailure(),
        departure=Departure(),
        clock=time,
    )


def join(leader: Leader, node_rank: int, *, member: str = "", **settings: str) -> JoinAnswer:
    request = JoinNode(node_rank=node_rank, member=member or f"m{node_rank}", settings={**SETTINGS, **settings})
    answer = leader.answer(request)
    assert isinstance(answer, JoinAnswer)
    return answer


def beat(leader: Leader, node_rank: int, *, session: str = "", member: str = "", leaving: bool = False) -> BeatAnswer:
    message = NodeBeat(
        session=session or leader.session, node_rank=node_rank, member=member or f"m{node_rank}", leaving=leaving
    )
    answer = leader.answer(message)
    assert isinstance(answer, BeatAnswer)
    return answer


@pytest.fixture
def running(leader) -> Leader:
    join(leader, 1)
    assert join(leader, 2).begin
    return leader


def test_nodes_begin_when_all_have_joined_within_the_timeout(leader, time):
    assert not join(leader, 1).begin
    time.now += SILENCE_S + 1
    assert not join(leader, 2).begin
    assert leader.missing() == [1]
    answer = join(leader, 1)
    assert (answer.begin, answer.self_test, leader.begun.is_set()) == (True, True, True)
    assert join(leader, 2).begin


@pytest.mark.parametrize(
    ("settings", "clause"),
    [
        ({"checkpoint": "f2"}, "checkpoint is f2 there and f1 on node 0"),
        ({"cache.page_size": "64"}, "cache.page_size is 64 there and 16 on node 0"),
        ({"parallel.dist_init_addr": '"other:1"'}, "parallel.dist_init_addr"),
        ({"unheard_of": "1"}, "unheard_of is 1 there and nothing on node 0"),
    ],
)
def test_node_with_other_settings_is_rejected_at_join(leader, settings, clause):
    answer = join(leader, 1, **settings)
    assert clause in answer.refused
    assert (answer.begin, leader.missing()) == (False, [1, 2])


@pytest.mark.parametrize("node_rank", [0, 3, -1, 2**40])
def test_node_that_the_engine_does_not_have_is_refused(leader, node_rank):
    assert "the other nodes are 1 to 2, not" in join(leader, node_rank).refused


def test_restarted_node_replaces_itself_before_start(leader):
    join(leader, 1, member="first")
    assert not join(leader, 1, member="second").refused
    assert join(leader, 2).begin
    assert beat(leader, 1, member="first").ended
    assert not beat(leader, 1, member="second").ended


def test_node_that_starts_again_later_is_the_end_of_the_engine(running):
    assert "part of a running engine" in join(running, 1, member="second").refused
    with pytest.raises(RankLostError, match="node 1 has started again"):
        running.failure.raise_if_any()
    assert beat(running, 2) == BeatAnswer(session=running.session, ended=True, reason="node 1 has started again")


def test_silence_is_the_end_and_rank_0_has_a_bound_to_leave(running, time):
    time.now += SILENCE_S
    beat(running, 2)
    assert not running.look()
    time.now += 1
    assert not running.look()
    with pytest.raises(RankLostError, match="no heartbeat of node 1 for 31 s"):
        running.failure.raise_if_any()
    time.now += LEAVE_S
    assert not running.look()
    time.now += 1
    assert running.look()
    running.over.set()
    assert not running.look()


def test_exit_message_of_lost_node_is_reported_to_other_nodes(running):
    assert running.answer(NodeLost(session="another", node_rank=1, reason="old")) is None
    assert running.failure.error is None
    running.answer(NodeLost(session=running.session, node_rank=1, reason="rank 2 was ended by signal 9"))
    assert running.cause == "node 1: rank 2 was ended by signal 9"
    assert not running.all_notified
    assert beat(running, 2).reason == running.cause
    assert running.all_notified


def test_node_of_previous_leader_session_is_ended(running):
    assert beat(running, 1, session="another").ended
    call = StoreCall(session="another", nonce=7, action=StoreAction.SET, keys=("k",), value=b"v")
    answer = running.answer(call)
    assert (answer.nonce, answer.refused) == (7, "the engine that this rank belongs to is over")
    assert not running.store.check(["k"])


def test_node_serves_when_all_of_its_ranks_follow(running):
    running.store.set(follows_key(2), "1")
    assert not beat(running, 1).serving
    running.store.set(follows_key(3), "1")
    assert (beat(running, 1).serving, beat(running, 2).serving) == (True, False)


def test_leaving_node_drains_engine_before_it_ends(running):
    assert not beat(running, 1, leaving=True).ended
    assert running.departure.reason == "node 1 is to leave"
    running.over.set()
    assert beat(running, 1) == BeatAnswer(session=running.session, ended=True)


def test_paths_and_core_counts_may_differ_between_nodes():
    parallel = replace(PARALLEL, node_rank=2)
    other = replace(CONFIG, model_path="/data/a", threads=7, parallel=parallel)
    assert difference(SETTINGS, settings_of(other, "f1")) is None
    assert difference(SETTINGS, settings_of(replace(CONFIG, dtype="float32"), "f1")) is not None
