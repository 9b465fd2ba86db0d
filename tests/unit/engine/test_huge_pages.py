"""Weights go to huge pages whole, and are afterwards what they were."""

import ctypes
import mmap
from pathlib import Path

import pytest

from tandem_engine.base import linux
from tandem_engine.base.linux import HUGE, MAX_BETWEEN, PIECE, movable, to_huge_pages, whole_pages

HUGEPAGE, COLLAPSE = 14, 25
"""Of Linux's asm-generic/mman-common.h."""


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),
        ([(HUGE, HUGE)], [(HUGE, HUGE)]),
        ([(HUGE, HUGE - 1)], []),
        ([(HUGE + 1, 2 * HUGE)], [(2 * HUGE, HUGE)]),
        ([(HUGE, HUGE // 2), (HUGE + HUGE // 2, HUGE // 2)], [(HUGE, HUGE)]),
        ([(5 * HUGE, HUGE), (HUGE, HUGE)], [(HUGE, HUGE), (5 * HUGE, HUGE)]),
        ([(HUGE, HUGE), (2 * HUGE + MAX_BETWEEN, HUGE - MAX_BETWEEN)], [(HUGE, 2 * HUGE)]),
        ([(HUGE, HUGE), (2 * HUGE + MAX_BETWEEN + 1, HUGE)], [(HUGE, HUGE)]),
        ([(HUGE, 3 * HUGE), (2 * HUGE, HUGE), (HUGE, 3 * HUGE)], [(HUGE, 3 * HUGE)]),
        ([(0, 0)], []),
    ],
)
def test_weights_that_lie_side_by_side_share_pages(ranges, expected):
    assert whole_pages(ranges) == expected


def test_huge_pages_keep_memory_contents():
    size = 4 * HUGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pattern = bytes(range(256)) * (size // 256)
        memory.write(pattern)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        [(_, whole)] = whole_pages([(address, size)])
        # Whether the system has any left is not ours to say.
        assert to_huge_pages([(address, size)]) in (0, whole)
        assert memory[:] == pattern


class Advised:
    """`madvise` of a system that cannot move the pieces that begin at `stuck`, or does not know how to."""

    def __init__(self, *stuck: int, knows: bool = True) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._stuck, self._knows = stuck, knows

    def __call__(self, address: int, size: int, advice: int) -> int:
        self.calls.append((address, size, advice))
        return -1 if advice == COLLAPSE and (address in self._stuck or not self._knows) else 0


@pytest.fixture
def advise(monkeypatch):
    def use(advised: Advised) -> Advised:
        monkeypatch.setattr(linux, "_are_allowed", lambda: True)
        monkeypatch.setattr(linux, "_madvise", lambda: advised)
        return advised

    return use


LONG = [(HUGE, 2 * PIECE + HUGE), (5 * PIECE, PIECE)]
PIECES = [(HUGE, PIECE), (HUGE + PIECE, PIECE), (HUGE + 2 * PIECE, HUGE), (5 * PIECE, PIECE)]


def test_every_piece_is_advised_and_then_collapsed(advise):
    advised = advise(Advised())
    reported: list[int] = []
    assert to_huge_pages(LONG, advance=reported.append) == 3 * PIECE + HUGE
    assert advised.calls == [(*piece, advice) for piece in PIECES for advice in (HUGEPAGE, COLLAPSE)]
    assert reported == [size for _, size in PIECES]
    assert sum(reported) == sum(size for _, size in movable(LONG))


def test_piece_that_cannot_become_huge_pages_does_not_stop_the_other_pieces(advise):
    """All of a range was asked for at once: a page that could not be moved ended it, and nothing was counted."""
    advised = advise(Advised(HUGE + PIECE))
    assert to_huge_pages(LONG) == 2 * PIECE + HUGE
    assert [call for call in advised.calls if call[2] == COLLAPSE] == [(*piece, COLLAPSE) for piece in PIECES]


def test_failed_collapse_is_left_to_background_daemon(advise):
    advised = advise(Advised(knows=False))
    assert to_huge_pages(LONG) == 0
    assert [call for call in advised.calls if call[2] == HUGEPAGE] == [(*piece, HUGEPAGE) for piece in PIECES]


def test_machine_that_has_them_switched_off_is_left_alone(tmp_path: Path, monkeypatch):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(linux, "SETTING", setting)
    monkeypatch.setattr(linux, "advise", lambda *_: pytest.fail("the kernel is called"))
    assert to_huge_pages([(HUGE, HUGE)]) == 0


def test_system_without_huge_pages_is_not_asked_for_them(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(linux, "SETTING", tmp_path / "absent")
    monkeypatch.setattr(linux, "advise", lambda *_: pytest.fail("the kernel is called"))
    assert to_huge_pages([(HUGE, HUGE)]) == 0


def test_unmovable_memory_is_no_error(monkeypatch):
    monkeypatch.setattr(linux, "_are_allowed", lambda: True)
    assert to_huge_pages([(1 << 45, HUGE)]) == 0  # nothing lies there
