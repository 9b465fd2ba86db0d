import os

import pytest

from tandem_engine.base import cgroups
from tandem_engine.base.cgroups import (
    Throttling,
    cpu_quota,
    describe_memory,
    memory_groups,
    memory_kills,
    memory_limit,
    memory_shortage,
    process_limit,
    throttling,
    usable_cpus,
)


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    return {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroup"}


def write(machine, groups: str, **files: str) -> None:
    """Files by path below the root of the groups, with / as __."""
    (machine["proc"] / "self/cgroup").write_text(groups)
    for name, text in files.items():
        path = machine["cgroups"] / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_process_without_groups_has_no_quota(machine):
    assert cpu_quota(**machine) is None
    assert throttling(**machine) == Throttling()


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", None), ("150000 100000", 1.5), ("20000 50000", 0.4), ("", None), ("garbage", None), ("1 0", None)],
)
def test_quota_of_version_2_is_read(machine, text, quota):
    write(machine, "0::/pod\n", pod__cpu_dot_max=text)
    assert cpu_quota(**machine) == quota


@pytest.mark.parametrize(("text", "quota"), [("-1", None), ("400000", 4.0), ("40000", 0.4)])
def test_quota_of_version_1_is_read(machine, text, quota):
    files = {"cpu__pod__cpu_dot_cfs_quota_us": text, "cpu__pod__cpu_dot_cfs_period_us": "100000"}
    write(machine, "3:cpu,cpuacct:/pod\n2:memory:/pod\n", **files)
    assert cpu_quota(**machine) == quota


def test_tightest_group_up_to_the_root_counts(machine):
    write(
        machine,
        "0::/slice/pod\n",
        slice__pod__cpu_dot_max="800000 100000",
        slice__cpu_dot_max="200000 100000",
        cpu_dot_max="max 100000",
    )
    assert cpu_quota(**machine) == 2.0


@pytest.mark.parametrize(
    ("groups", "name", "stat"),
    [
        ("0::/pod\n", "pod__cpu_dot_stat", "usage_usec 9\nnr_periods 40\nnr_throttled 10\nthrottled_usec 2500000\n"),
        ("3:cpu:/pod\n", "cpu__pod__cpu_dot_stat", "nr_periods 40\nnr_throttled 10\nthrottled_time 2500000000\n"),
    ],
)
def test_throttled_periods_are_read(machine, groups, name, stat):
    write(machine, groups, **{name: stat})
    assert throttling(**machine) == Throttling(periods=40, throttled=10, seconds=2.5)


@pytest.mark.parametrize(
    ("quota", "allowed", "usable"), [(None, 64, 64), (4.0, 64, 4), (2.9, 64, 2), (0.4, 64, 1), (8.0, 2, 2)]
)
def test_usable_cpus_fit_the_quota(monkeypatch, quota, allowed, usable):
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(allowed))
    assert usable_cpus() == usable


@pytest.mark.parametrize(
    ("groups", "file"),
    [("0::/pod\n", "pod__memory_dot_events"), ("4:memory:/pod\n", "memory__pod__memory_dot_oom_control")],
)
def test_processes_killed_for_memory_are_counted(machine, groups, file):
    assert memory_kills(**machine) == 0
    write(machine, groups, **{file: "low 0\noom 7\noom_kill 3\n"})
    assert memory_kills(**machine) == 3


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({}, "the memory of this machine was used up"),
        ({"pod__memory_dot_high": "1048576"}, "the memory of this machine was used up"),
        ({"memory_dot_max": str(9 << 30)}, "the memory of this machine was used up"),
        ({"memory_dot_max": str(3 << 30), "pod__memory_dot_high": "1"}, "the memory limit of 3.00 GiB was reached"),
    ],
)
def test_shortage_names_the_limit_at_which_the_kernel_kills(machine, files, cause):
    (machine["proc"] / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\n")
    write(machine, "0::/pod\n", **files)
    assert memory_shortage(**machine) == cause


def test_limit_that_stops_processes_counts_as_a_limit(machine):
    write(
        machine,
        "0::/pod\n",
        pod__memory_dot_max="9000000000",
        pod__memory_dot_high="805306368",
        pod__memory_dot_current="96",
    )
    assert memory_limit(**machine) == 3 << 28
    assert describe_memory(**machine) == "a memory limit of 0.75 GiB (memory.high)"
    assert [(group.limit, group.used, group.kills) for group in memory_groups(**machine)] == [
        (9_000_000_000, 96, True),
        (3 << 28, 96, False),
    ]


def test_memory_limit_is_the_smallest_of_all_groups(machine):
    assert memory_limit(**machine) is None
    assert describe_memory(**machine) == "no memory limit"
    write(
        machine, "0::/pods/one\n", pods__one__memory_dot_max="max", pods__memory_dot_max="4096", memory_dot_max="8192"
    )
    assert memory_limit(**machine) == 4096
    assert [group.used for group in memory_groups(**machine)] == [0, 0]


def test_process_limit_is_that_of_the_group_with_the_least_room(machine):
    assert process_limit(**machine) is None
    write(
        machine,
        "8:pids:/node/pod\n",
        pids__node__pod__pids_dot_max="max",
        pids__node__pod__pids_dot_current="7",
        pids__node__pids_dot_max="300",
        pids__node__pids_dot_current="290",
        pids__pids_dot_max="1000",
        pids__pids_dot_current="700",
    )
    assert process_limit(**machine) == (290, 300)
    write(machine, "0::/pod\n", pod__pids_dot_max="40", pod__pids_dot_current="39")
    assert process_limit(**machine) == (39, 40)
    assert cgroups.describe_process_limit(**machine) == "this container runs 39 of 40 threads and processes (pids.max)"


def test_process_limit_with_room_means_that_of_the_user(machine):
    write(machine, "0::/pod\n", pod__pids_dot_max="40", pod__pids_dot_current="30")
    assert "ulimit -u" in cgroups.describe_process_limit(**machine)
