"""What was freed in the middle of a heap is the system's again."""

import ctypes
import gc

import pytest

from tandem_engine.base.freed_memory import BUSY_S, REST_S, AtRest, give_back, lasting
from tandem_engine.executor.memory_profile import HostMeter

BLOCKS, BLOCK_BYTES = 600, 100_000
"""Each has whole pages, in whatever gap of the heap it lies, and is small enough to lie in the heap."""


def test_memory_below_a_block_that_stays_is_given_back():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("no glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    stays = libc.malloc(BLOCK_BYTES)
    try:
        for block in blocks:
            libc.free(block)
        held = HostMeter().used()
        give_back()
        assert held - HostMeter().used() > BLOCKS * BLOCK_BYTES / 2
    finally:
        libc.free(stays)


def test_each_idle_period_frees_memory_once():
    given: list[float] = []
    now = 100.0
    rest = AtRest(lambda: given.append(now), short=lambda: False)
    for now, worked in (
        (100.0, False),  # nothing was done yet
        (110.0, True),
        (110.1, False),
        (110.0 + REST_S / 2, True),
        (110.0 + REST_S, False),
        (111.0 + REST_S, False),
        (112.0 + 2 * REST_S, False),
        (150.0, True),
        (150.0 + REST_S, False),
    ):
        rest.turn(worked=worked, now=now)
    assert given == [111.0 + REST_S, 150.0 + REST_S]


def test_work_gives_back_while_the_container_is_short_of_memory():
    given: list[float] = []
    short = {100.0: False, 100.0 + BUSY_S: True, 100.0 + 2 * BUSY_S: True, 100.0 + 3 * BUSY_S: False}
    now = 0.0
    rest = AtRest(lambda: given.append(now), short=lambda: short[now])
    for now in sorted([*short, 101.0 + BUSY_S]):  # the additional one is too soon to look again
        rest.turn(worked=True, now=now)
    assert given == [100.0 + BUSY_S, 100.0 + 2 * BUSY_S]


def test_what_lasts_is_not_walked_for_garbage():
    frozen = gc.get_freeze_count()
    try:
        with lasting():
            assert not gc.isenabled()
            lists = [[] for _ in range(10)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= frozen + len(lists)
        with pytest.raises(ImportError), lasting():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
