"""Rank 0 and the processes of the other ranks: none outlives the other, and the reason is reported."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from tandem_engine.base.errors import ConfigError, RankLostError
from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.engine import launch
from tandem_engine.parallel import rank_processes
from tandem_engine.parallel.group import FirstFailure
from tandem_engine.parallel.rank_processes import RankProcesses, other_ranks

CONFIG = EngineConfig(model_path="/nowhere", parallel=ParallelConfig(tp_size=2, timeout=120.0))

READ_ORDER = (
    "import json, sys, pathlib; order = json.loads(sys.stdin.readline()); folder = pathlib.Path(order['folder']);"
)


def become(monkeypatch, program: str) -> None:
    """Let every rank that is started run `program`."""
    monkeypatch.setattr(rank_processes, "COMMAND", (sys.executable, "-c", program))


def test_single_rank_engine_starts_no_processes(monkeypatch):
    monkeypatch.setattr(rank_processes, "COMMAND", ("/no/such/program",))
    with other_ranks(replace(CONFIG, parallel=ParallelConfig()), self_test=False) as parallel:
        assert (parallel.rank, parallel.size) == (0, 1)


def test_rank_that_cannot_start_is_reported_with_its_error(monkeypatch):
    become(
        monkeypatch,
        READ_ORDER + "(folder / f\"rank-{order['rank']}.error\").write_text('no memory for 3 GiB'); sys.exit(3)",
    )
    with (
        pytest.raises(RankLostError, match=r"rank 1 ended with status 3: no memory for 3 GiB"),
        other_ranks(CONFIG, self_test=False),
    ):
        pass


def test_rank_that_was_killed_is_reported_by_its_signal(monkeypatch):
    become(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RankLostError, match="rank 1 was ended by signal 9"), other_ranks(CONFIG, self_test=False):
        pass


def test_truncated_error_of_rank_is_reported_as_it_is(monkeypatch):
    """They could not be read, and the engine waited forever for the reader."""
    become(
        monkeypatch,
        READ_ORDER + "(folder / f\"rank-{order['rank']}.error\").write_bytes(b'no memory \\xe2\\x80'); sys.exit(3)",
    )
    with (
        pytest.raises(RankLostError, match="rank 1 ended with status 3: no memory \ufffd"),
        other_ranks(CONFIG, self_test=False),
    ):
        pass


def test_rank_killed_before_its_first_message_is_reported(monkeypatch):
    """Its order could not be written, and closing the pipe failed over it: the engine waited forever."""
    become(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    start_process = subprocess.Popen

    def ended(*args: object, **options: object) -> "subprocess.Popen[bytes]":
        process = start_process(*args, **options)
        # The pipe has no reader any more, and the status was not collected.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    monkeypatch.setattr(rank_processes.subprocess, "Popen", ended)
    with pytest.raises(RankLostError, match="rank 1 was ended by signal 9"), other_ranks(CONFIG, self_test=False):
        pass


def test_rank_that_does_not_start_within_the_timeout_is_lost(monkeypatch):
    become(monkeypatch, READ_ORDER + "sys.stdin.read()")
    hasty = replace(CONFIG, parallel=ParallelConfig(tp_size=2, timeout=0.1))
    with (
        pytest.raises(RankLostError, match=r"rank 1 did not start within 0.1 s; raise --dist-timeout"),
        other_ranks(hasty, self_test=False),
    ):
        pass


def start(program: str, failure: FirstFailure) -> RankProcesses:
    process = subprocess.Popen((sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    order = rank_processes.RankOrder(engine=CONFIG, rank=1, folder="/nowhere", self_test=False)
    return RankProcesses(ranks=[rank_processes.RankProcess(order=order, process=process)], failure=failure)


def test_when_this_rank_fails_the_others_are_ended():
    failure = FirstFailure()
    others = start("import sys; sys.stdin.read()", failure)
    watcher = threading.Thread(target=others.watch)
    watcher.start()
    failure.record(ValueError("index out of range"))
    watcher.join()
    assert others.ranks[0].process.returncode == -9
    with pytest.raises(RankLostError, match="a model step raised ValueError"):
        failure.raise_if_any()
    others.ranks[0].process.stdout.close()


def test_rank_that_leaves_after_stop_is_not_lost():
    failure = FirstFailure()
    others = start("pass", failure)
    others.ranks[0].process.wait()
    others.done.set()
    others.watch()
    assert failure.error is None
    assert others.ranks[0].lost() is None
    others.end(grace_s=0.0)
    others.ranks[0].process.stdout.close()


def test_only_the_first_failure_counts():
    failure = FirstFailure()
    failure.record(RankLostError("rank 1 ended"))
    failure.record(ValueError("and therefore"))
    with pytest.raises(RankLostError, match="rank 1 ended"):
        failure.raise_if_any()


def test_order_reaches_the_rank_as_it_was_given(monkeypatch, capfd):
    become(monkeypatch, READ_ORDER + "print(json.dumps(order), file=sys.stderr); sys.exit(5)")
    with pytest.raises(RankLostError), other_ranks(CONFIG, self_test=True):
        pass
    [order] = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert (order["rank"], order["self_test"], order["engine"]["parallel"]["tp_size"]) == (1, True, 2)


@pytest.mark.parametrize(("tp_size", "timeout"), [(0, 1.0), (2, 0.0), (2, float("inf")), (2, float("nan"))])
def test_impossible_configuration_is_refused(tp_size, timeout):
    with pytest.raises(ConfigError, match="--tensor-parallel-size|--dist-timeout"):
        ParallelConfig(tp_size=tp_size, timeout=timeout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 3, "nnodes": 2}, "--nnodes must be at least 1 and divide --tensor-parallel-size 3, got 2"),
        ({"nnodes": 0}, "--nnodes"),
        ({"tp_size": 2, "nnodes": 2, "dist_init_addr": "a:1", "node_rank": 2}, "--node-rank must be below --nnodes 2"),
        ({"node_rank": 1}, "--node-rank"),
        ({"tp_size": 2, "nnodes": 2}, "--dist-init-addr must be HOST:PORT of node 0 with --nnodes 2, got ''"),
        ({"tp_size": 2, "nnodes": 2, "dist_init_addr": "a b:1"}, "--dist-init-addr"),
        ({"tp_size": 2, "nnodes": 2, "dist_init_addr": "a"}, "--dist-init-addr"),
        ({"dist_init_addr": "a:1"}, "--dist-init-addr a:1 needs --nnodes above 1"),
        ({"init_timeout": 0.0}, "--dist-init-timeout"),
    ],
)
def test_nodes_that_cannot_share_an_engine_are_refused(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ParallelConfig(**fields)


def test_each_node_has_its_share_of_the_ranks():
    parallel = ParallelConfig(tp_size=6, nnodes=3, node_rank=1, dist_init_addr="[fd00::7]:5757")
    assert (parallel.local_size, list(parallel.ranks_of(1)), parallel.local_rank(3)) == (2, [2, 3], 1)
    assert parallel.init_address.port == 5757


def test_several_nodes_without_a_worker_service_are_rejected(monkeypatch):
    monkeypatch.setattr(launch, "require_loadable", lambda _: None)
    two = replace(CONFIG, parallel=ParallelConfig(tp_size=2, nnodes=2, dist_init_addr="a:1"))
    with (
        pytest.raises(ConfigError, match="--nnodes 2 is for `tandem worker`"),
        launch.launched_engine(two, progress=False),
    ):
        pass
