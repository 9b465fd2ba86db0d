"""Weights go to huge pages whole, and are afterwards what they were."""

import ctypes
import mmap
from pathlib import Path

import pytest

from tandem_engine import huge_pages
from tandem_engine.huge_pages import HUGE, MOST_BETWEEN, to_huge_pages, whole_pages


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),
        ([(HUGE, HUGE)], [(HUGE, HUGE)]),
        ([(HUGE, HUGE - 1)], []),
        ([(HUGE + 1, 2 * HUGE)], [(2 * HUGE, HUGE)]),
        ([(HUGE, HUGE // 2), (HUGE + HUGE // 2, HUGE // 2)], [(HUGE, HUGE)]),
        ([(5 * HUGE, HUGE), (HUGE, HUGE)], [(HUGE, HUGE), (5 * HUGE, HUGE)]),
        ([(HUGE, HUGE), (2 * HUGE + MOST_BETWEEN, HUGE - MOST_BETWEEN)], [(HUGE, 2 * HUGE)]),
        ([(HUGE, HUGE), (2 * HUGE + MOST_BETWEEN + 1, HUGE)], [(HUGE, HUGE)]),
        ([(HUGE, 3 * HUGE), (2 * HUGE, HUGE), (HUGE, 3 * HUGE)], [(HUGE, 3 * HUGE)]),
        ([(0, 0)], []),
    ],
)
def test_weights_that_lie_side_by_side_share_pages(ranges, expected):
    assert whole_pages(ranges) == expected


def test_what_memory_holds_is_the_same_afterwards():
    size = 4 * HUGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pattern = bytes(range(256)) * (size // 256)
        memory.write(pattern)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        [(_, whole)] = whole_pages([(address, size)])
        # Whether the system has any left is not ours to say.
        assert to_huge_pages([(address, size)]) in (0, whole)
        assert memory[:] == pattern


def test_a_machine_that_has_them_switched_off_is_left_alone(tmp_path: Path, monkeypatch):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "SETTING", setting)
    monkeypatch.setattr(huge_pages, "_advise", lambda *_: pytest.fail("nobody is to be asked"))
    assert to_huge_pages([(HUGE, HUGE)]) == 0


def test_a_system_without_them_is_left_alone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(huge_pages, "SETTING", tmp_path / "absent")
    monkeypatch.setattr(huge_pages, "_advise", lambda *_: pytest.fail("nobody is to be asked"))
    assert to_huge_pages([(HUGE, HUGE)]) == 0


def test_what_cannot_be_moved_is_no_error(monkeypatch):
    monkeypatch.setattr(huge_pages, "_are_allowed", lambda: True)
    assert to_huge_pages([(1 << 45, HUGE)]) == 0  # nothing lies there
