"""Nodes that meet over TCP, with keys: the leader's server, the store behind it, and groups that are formed by it."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tandem_engine.base.errors import ConfigError, RankLostError
from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.ipc.channels import CallChannel
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.nodes import JoinNode, LeaderToNode, NodeToLeader
from tandem_engine.parallel import node_follower as follower_module
from tandem_engine.parallel import rank_processes
from tandem_engine.parallel.group import Departure, FirstFailure, Parallel
from tandem_engine.parallel.node_follower import Follower
from tandem_engine.parallel.node_leader import Leader, LeaderServer, NodeAccess, settings_of
from tandem_engine.parallel.node_store import RemoteStore
from tandem_engine.parallel.torch_group import PROOF_BYTES, interface_of, join_ranks, require_proofs
from tandem_services.common.sockets import free_port

PATIENCE_S = 60.0
LEADER, NODE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def keys(tmp_path) -> Path:
    path = tmp_path / "keys.json"
    KeyPair.generate().save(path)
    return path


@pytest.fixture
def config() -> EngineConfig:
    address = f"{LEADER}:{free_port(LEADER)}"
    parallel = ParallelConfig(tp_size=2, nnodes=2, dist_init_addr=address, init_timeout=PATIENCE_S)
    return EngineConfig(model_path="/nowhere", parallel=parallel)


@pytest.fixture
def server(config, keys) -> Iterator[LeaderServer]:
    leader = Leader(
        parallel=config.parallel,
        settings=settings_of(config, "f1"),
        self_test=False,
        failure=FirstFailure(),
        departure=Departure(),
    )
    server = LeaderServer.open(leader, NodeAccess(host=LEADER, curve_keys=keys))
    yield server
    server.close()


def remote_store(server: LeaderServer, keys: Path, *, session: str | None = None, timeout_s: float = PATIENCE_S):
    context = NodeAccess(host=NODE, curve_keys=keys).open()
    channel: CallChannel[LeaderToNode, NodeToLeader] = CallChannel(
        context, server.channel.endpoint, inbound=LeaderToNode, outbound=NodeToLeader
    )
    store = RemoteStore(channel, session=session or server.leader.session, timeout_s=timeout_s)
    return context, store


def test_ranks_on_two_addresses_form_and_reform_groups(server, keys):
    context, theirs = remote_store(server, keys)

    def work(rank: int) -> list[float]:
        store, host = ((server.leader.store, LEADER), (theirs, NODE))[rank]
        parallel: Parallel = join_ranks(
            store, rank=rank, size=2, device=torch.device("cpu"), timeout_s=PATIENCE_S, host=host
        )
        with closing(parallel):
            first = parallel.forward.all_reduce(torch.full((3,), rank + 1.0)).tolist()
            parallel.forward.leave()
            parallel.forward.meet_again()
            return first + parallel.forward.all_reduce(torch.full((1,), rank + 4.0)).tolist()

    with closing(context), ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [[3.0, 3.0, 3.0, 9.0]] * 2


def test_remote_store_behaves_as_torch_hash_store(server, keys):
    context, store = remote_store(server, keys)
    with closing(context):
        for one in (store, HashStore()):
            one.set("bytes", b"\x00\xff" if one is store else "\x00")
            one.set("text", "1")
            assert (one.add("n", 2), one.add("n", 3)) == (2, 5)
            assert one.get("text") == b"1"
            assert one.check(["text", "n"])
            assert not one.check(["text", "absent"])
            assert (one.delete_key("text"), one.check(["text"])) == (True, False)
        assert store.get("bytes") == b"\x00\xff"


def test_rank_of_another_engine_reads_and_writes_nothing(server, keys):
    context, store = remote_store(server, keys, session="of yesterday")
    with closing(context), pytest.raises(RankLostError, match="is over"):
        store.set("k", "v")
    assert not server.leader.store.check(["k"])


def test_node_without_deployment_keys_gets_no_reply(server, tmp_path):
    strange = tmp_path / "strange.json"
    KeyPair.generate().save(strange)
    for keys in (strange, None):
        context, store = remote_store(server, keys, timeout_s=0.5)
        with closing(context), pytest.raises(RankLostError, match="has not answered"):
            store.set("k", "v")
    assert not server.leader.store.check(["k"])


def test_off_loopback_nodes_have_keys_or_do_not_start(config):
    with pytest.raises(ConfigError, match="--curve-keys"):
        NodeAccess(host="10.0.0.7").open()


def test_group_connected_to_foreign_process_is_rejected():
    def strange(output: torch.Tensor, mine: torch.Tensor) -> None:
        output.copy_(mine)  # as a process that returns what it gets

    with pytest.raises(RankLostError, match="rank 0 of 2 connected to a process that is not rank 1"):
        require_proofs(HashStore(), strange, rank=0, size=2)


def test_proofs_of_the_right_ranks_are_taken():
    store, rows = HashStore(), torch.zeros(2, 2, PROOF_BYTES, dtype=torch.uint8)
    both = threading.Barrier(2)

    def work(rank: int) -> None:
        def exchange(output: torch.Tensor, mine: torch.Tensor) -> None:
            rows[rank] = mine
            both.wait(PATIENCE_S)
            output.copy_(rows[:, rank])

        require_proofs(store, exchange, rank=rank, size=2)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [None, None]


def test_interface_is_known_by_its_address():
    assert interface_of(LEADER) == interface_of("localhost") == "lo"
    with pytest.raises(ConfigError, match="--host 192.0.2.77 is no address of this machine"):
        interface_of("192.0.2.77")


# A follower, with processes that stand for its ranks.


def follow(config: EngineConfig, keys: Path | None, *, report: Callable[[bool], None] = lambda _: None) -> Follower:
    mine = replace(config, parallel=replace(config.parallel, node_rank=1))
    return Follower(
        config=mine,
        access=NodeAccess(host=NODE, curve_keys=keys),
        settings=settings_of(mine, "f1"),
        report=report,
    )


def become(monkeypatch, program: str) -> None:
    monkeypatch.setattr(rank_processes, "COMMAND", (sys.executable, "-c", program))


def test_exit_of_rank_is_reported_on_both_nodes(monkeypatch, server, config, keys, capfd):
    become(monkeypatch, "import sys; print(sys.stdin.readline(), file=sys.stderr, flush=True); sys.exit(5)")
    with pytest.raises(RankLostError, match="rank 1 ended with status 5"):
        follow(config, keys).follow()
    assert server.leader.lost.wait(PATIENCE_S)
    assert server.leader.cause == "node 1: rank 1 ended with status 5"
    [order] = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert order["meeting"] == {
        "endpoint": f"tcp://{config.parallel.dist_init_addr}",
        "session": server.leader.session,
        "host": NODE,
        "curve_keys": str(keys),
    }
    assert (order["rank"], order["engine"]["parallel"]["node_rank"]) == (1, 1)


def test_when_the_engine_is_over_the_node_ends_in_order(monkeypatch, server, config, keys):
    become(monkeypatch, "import sys; sys.stdin.read()")
    monkeypatch.setattr(follower_module, "STOP_S", 0.0)

    def end_once_begun(serving: bool) -> None:
        assert not serving
        if server.leader.begun.is_set():
            server.leader.over.set()

    follow(config, keys, report=end_once_begun).follow()
    assert server.leader.all_notified


def test_rejected_node_fails_with_reason_without_retry(server, config, keys):
    with pytest.raises(ConfigError, match=r"node 0 at .* refuses this node: .*page_size"):
        follow(replace(config, cache=replace(config.cache, page_size=64)), keys).follow()


def test_follower_without_leader_fails_after_init_timeout(config, keys):
    hasty = replace(config, parallel=replace(config.parallel, init_timeout=0.2))
    with pytest.raises(RankLostError, match=r"node 1 waited 0.2 s for node 0 at .*, which does not answer"):
        follow(hasty, keys).follow()


def test_leader_that_falls_silent_ends_the_node(monkeypatch, server, config, keys):
    become(monkeypatch, "import sys; sys.stdin.read()")
    monkeypatch.setattr(follower_module, "SILENCE_S", 0.5)
    answer = server.leader.answer
    monkeypatch.setattr(
        server.leader, "answer", lambda message: answer(message) if isinstance(message, JoinNode) else None
    )
    with pytest.raises(RankLostError, match="no heartbeat of node 0 for 0.5 s"):
        follow(config, keys).follow()


def test_node_that_does_not_come_is_named(config, keys):
    parallel = replace(config.parallel, init_timeout=0.2)
    leader = Leader(parallel=parallel, settings={}, self_test=False, failure=FirstFailure(), departure=Departure())
    server = LeaderServer.open(leader, NodeAccess(host=LEADER, curve_keys=keys))
    with closing(server), pytest.raises(RankLostError, match=r"node 1 of 2 has not come to .* within 0.2 s"):
        server.gather()


def test_rank_0_that_cannot_leave_is_ended(config, keys):
    leader = Leader(
        parallel=config.parallel,
        settings={},
        self_test=False,
        failure=FirstFailure(),
        departure=Departure(),
        clock=iter(range(0, 10**9, 20)).__next__,
    )
    ended = threading.Event()
    server = LeaderServer.open(leader, NodeAccess(host=LEADER, curve_keys=keys))
    server.abandon = lambda status: ended.set() if status == 3 else None
    with closing(server):
        leader.failure.record(RankLostError("node 1 has said nothing"))
        assert ended.wait(PATIENCE_S)


def test_reason_of_a_stuck_engine_is_written_before_it_ends():
    program = (
        "import logging\n"
        "from tandem_engine.base.logs import LogFormat, configure_logging\n"
        "from tandem_engine.parallel.node_leader import leave\n"
        "configure_logging(LogFormat.JSON)\n"
        "logging.error('rank 0 is stuck')\n"
        "leave(7)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "rank 0 is stuck" in ended.stderr) == (7, True)
