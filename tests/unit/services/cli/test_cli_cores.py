"""Cores that `tandem up` gives to its workers."""

import os
from pathlib import Path

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_engine.config.flags import engine_argv, engine_config
from tandem_services.cli import machine_shares, up
from tandem_services.cli.main import build_parser
from tandem_services.cli.processes import Child, Supervisor


@pytest.fixture(autouse=True)
def four_cores(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7}, raising=False)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


@pytest.fixture
def claimed(tmp_path):
    """What the workers of a command line get; given back afterwards."""
    given = []

    def claimed_by(*argv):
        args = build_parser().parse_args(["up", "--port", "0", "--run-dir", str(tmp_path / "run"), *argv])
        given.append(up.claim_cores(args, up.plan(args)))
        return given[-1]

    yield claimed_by
    for each in given:
        each.release()


@pytest.fixture
def claim(tmp_path):
    given = []

    def claimed_of(count, *, workers, folder=tmp_path):
        given.append(machine_shares.claim(range(count), workers=workers, threads=1, folder=folder))
        return given[-1]

    yield claimed_of
    for each in given:
        each.release()


def test_each_worker_has_cores_of_its_own(claimed):
    both = claimed()
    assert both.of_worker == ("4,5", "6,7")
    assert [both.flag(0), both.flag(1)] == ["4,5", "6,7"]
    both.release()
    assert claimed("--threads", "1").of_worker == ("4", "5")


@pytest.mark.parametrize(
    "argv",
    [
        ["--cpu-affinity", "none"],
        ["--prefill", "0", "--decode", "0", "--both", "1"],
        ["--threads", "3"],
        ["--decode", "4"],
        ["--device", "cuda"],
    ],
)
def test_workers_without_a_core_split_are_not_pinned(argv, claimed):
    none = claimed(*argv)
    assert none.of_worker == ()
    assert none.flag(0) is None


def test_second_system_takes_free_cores(claim):
    first, second = claim(4, workers=2), claim(4, workers=2)
    assert (first.of_worker, second.of_worker) == (("0", "1"), ("2", "3"))
    assert claim(4, workers=2).of_worker == ()
    first.release()
    assert claim(4, workers=2).of_worker == ("0", "1")


def test_claim_that_falls_short_leaves_nothing_taken(claim):
    held = claim(3, workers=2)
    assert claim(3, workers=2).of_worker == ()
    held.release()
    assert claim(3, workers=3).of_worker == ("0", "1", "2")


def test_cores_that_cannot_be_claimed_are_not_bound(claim, tmp_path):
    assert claim(4, workers=2, folder=tmp_path / "missing").of_worker == ()


def test_cpu_affinity_flag_is_passed_to_the_worker():
    args = build_parser().parse_args(["up", "--threads", "1"])
    assert "--cpu-affinity" not in engine_argv(args)
    args.model, args.role, args.cpu_affinity = "m", "both", "4"
    again = build_parser().parse_args(["worker", "--redis-url", "redis://h", "--model", "m", *engine_argv(args)])
    assert engine_config(again).cpus == (4,)


@pytest.mark.parametrize(
    ("affinity", "error_message"),
    [("0", "this process may use 4,5,6,7"), ("4-", "must be auto, none or a list"), ("x", "must be auto, none or")],
)
def test_cores_that_are_not_this_process_s_are_refused(affinity, error_message):
    args = build_parser().parse_args(["worker", "--redis-url", "redis://h", "--model", "m", "--cpu-affinity", affinity])
    with pytest.raises(ConfigError, match=error_message):
        engine_config(args)


def test_up_divides_cores_itself(claimed):
    with pytest.raises(ConfigError, match="numbers are for `tandem worker`"):
        claimed("--cpu-affinity", "4-5")


def test_core_claims_lock_files_in_the_users_folder(tmp_path):
    claimed = machine_shares.claim({4, 5}, workers=2, threads=1)
    assert sorted(Path(lock.name) for lock in claimed.locks) == [
        tmp_path / f"tandem-{os.getuid()}" / "cores" / name for name in ("4", "5")
    ]
    claimed.release()


def test_every_worker_is_started_with_its_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(up, "require_redis", lambda _: None)
    monkeypatch.setattr(Child, "start", lambda _: None)
    args = build_parser().parse_args(["up", "--redis-url", "redis://h", "--port", "0", "--run-dir", str(tmp_path)])
    supervisor = Supervisor()
    up.start(args, up.plan(args), supervisor, machine_shares.Cores(of_worker=("4,5", "6,7")))
    flag = "--cpu-affinity"
    reported = {
        child.name: child.argv[child.argv.index(flag) + 1] for child in supervisor.children if flag in child.argv
    }
    assert reported == {"prefill-0": "4,5", "decode-0": "6,7"}
