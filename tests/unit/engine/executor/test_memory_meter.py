from pathlib import Path

import pytest
import torch

from tandem_engine.executor.memory_profile import CudaMeter, HostMeter

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path) -> Path:
    """A /proc and a /sys/fs/cgroup of 16 GiB, 12 of them free."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n")
    (proc / "self" / "status").write_text("VmRSS: 3000 kB\nRssFile: 1000 kB\nVmHWM: 5000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def meter(machine: Path) -> HostMeter:
    return HostMeter(proc=machine / "proc", cgroups=machine / "cgroup")


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_dot_", ".")).write_text(text)


def test_without_limits_a_process_may_have_the_machine(machine):
    assert (meter(machine).total(), meter(machine).available()) == (16 * GIB, 12 * GIB)


def test_libraries_are_not_the_process_s_own(machine):
    assert meter(machine).used() == 2000 * 1024


def test_tightest_control_group_above_counts(machine):
    (machine / "proc/self/cgroup").write_text("0::/pods/one\n")
    stat = f"anon 5\ninactive_file {GIB}\n"
    write(machine / "cgroup/pods/one", memory_dot_max="max", memory_dot_current="1")
    write(machine / "cgroup/pods", memory_dot_max=f"{4 * GIB}", memory_dot_current=f"{3 * GIB}", memory_dot_stat=stat)
    assert (meter(machine).total(), meter(machine).available()) == (4 * GIB, 2 * GIB)


def test_control_groups_of_version_1_count_too(machine):
    (machine / "proc/self/cgroup").write_text("4:memory:/pod\n1:cpu:/\n0::/\n")
    write(
        machine / "cgroup/memory/pod",
        memory_dot_limit_in_bytes=f"{2 * GIB}",
        memory_dot_usage_in_bytes=f"{GIB}",
        memory_dot_stat="total_inactive_file 0\n",
    )
    write(machine / "cgroup/memory", memory_dot_limit_in_bytes=f"{2**63}", memory_dot_usage_in_bytes="5")
    assert (meter(machine).total(), meter(machine).available()) == (2 * GIB, GIB)


def test_group_that_is_over_its_limit_has_nothing_left(machine):
    write(machine / "cgroup", memory_dot_max="100", memory_dot_current="200")
    assert meter(machine).available() == 0


def test_peak_is_found_even_when_nothing_of_it_remains():
    # Far more than the machine may reclaim of libraries' pages in the meantime.
    size = 256 << 20
    grown = HostMeter().peak_growth(lambda: torch.ones(size // 4).sum())
    assert grown > size // 2


def test_peak_growth_without_reset_uses_process_lifetime_peak(machine):
    (machine / "proc/self/clear_refs").mkdir()
    assert meter(machine).peak_growth(lambda: None) > 0


class Card:
    """torch's allocator on a card: it takes pieces of 20 MiB and keeps what is given back, until it is emptied."""

    def __init__(self, given: int) -> None:
        self.given = self.taken = self.most_taken = 0
        self.give(given)

    def give(self, size: int) -> None:
        self.given += size
        self.taken = max(self.taken, -(-self.given // PIECE) * PIECE)
        self.most_taken = max(self.most_taken, self.taken)

    def empty(self) -> None:
        self.taken = -(-self.given // PIECE) * PIECE

    def forget_peak(self) -> None:
        self.most_taken = self.taken


PIECE = 20 << 20


def test_step_memory_on_device_is_that_of_allocator(monkeypatch):
    card = Card(given=3 * PIECE)
    for name, answer in (
        ("synchronize", lambda _: None),
        ("empty_cache", card.empty),
        ("memory_reserved", lambda _: card.taken),
        ("max_memory_reserved", lambda _: card.most_taken),
        ("reset_peak_memory_stats", lambda _: card.forget_peak()),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)

    def step() -> None:
        card.give(PIECE + 1)
        card.give(-PIECE - 1)

    card.give(5 * PIECE)
    card.give(-5 * PIECE)
    meter = CudaMeter(torch.device("cuda", 0))
    assert meter.peak_growth(step) == 2 * PIECE
    assert card.taken == 5 * PIECE, "kept until it is emptied"
    assert meter.used() == 3 * PIECE
