"""What was freed in the middle of a heap is the system's again."""

import ctypes

import pytest

from tandem_engine.executor.memory_meter import HostMeter
from tandem_engine.freed import give_back

BLOCKS, BLOCK_BYTES = 100_000, 600


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
