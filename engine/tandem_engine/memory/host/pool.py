"""Host memory for KV pages: the bytes, not who owns them.

    data   uint8 [num_pages, page_bytes]     a page is laid out as in `KvPool`, so copies move whole rows

Every page can be used; there is no dummy page, for what reads here names the pages that it copies.
"""

import os
import weakref

import torch

from tandem_engine.errors import ConfigError
from tandem_engine.names import HostPageId

GIB = 1 << 30


class HostPool:
    """Pages of `page_bytes` each in the memory of this machine. Written by copies and by reads from storage."""

    def __init__(self, *, num_pages: int, page_bytes: int, pinned: bool = False) -> None:
        """`pinned`: for copies to and from a GPU that nobody waits for. It takes the memory at once.

        Raises `ConfigError` when the machine does not have the memory.
        """
        wanted, installed = num_pages * page_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted > installed:
            raise ConfigError(
                f"--hicache-size, --hicache-ratio and --swap-space ask for {wanted / GIB:.1f} GiB of host memory "
                f"and this machine has {installed / GIB:.1f} GiB: lower them"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        # Zeros come from calloc: a page costs physical memory when it is first written, not here.
        self.data = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
        self._buffer = self.data.numpy().reshape(-1).data
        if pinned:
            _pin(self.data)
            weakref.finalize(self, _unpin, self.data).atexit = False

    def bytes_view(self) -> torch.Tensor:
        """The bytes of all pages: uint8 [num_pages, page_bytes]."""
        return self.data

    def page_bytes_of(self, page: HostPageId) -> memoryview:
        """The bytes of one page, to be read or written in place."""
        return self._buffer[page * self.page_bytes : (page + 1) * self.page_bytes]


def _pin(data: torch.Tensor) -> None:
    """Have the driver know the memory of `data`. torch's own pinned memory comes in powers of two."""
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(driver.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
    if status != 0:
        raise ConfigError(
            f"{data.nbytes / GIB:.1f} GiB of host memory for --hicache-size, --hicache-ratio and --swap-space cannot "
            f"be pinned (CUDA error {status}): lower them, or raise the limit of locked memory (ulimit -l)"
        )


def _unpin(data: torch.Tensor) -> None:
    """Before its memory is anybody else's."""
    torch.cuda.cudart().cudaHostUnregister(data.data_ptr())  # type: ignore[no-untyped-call]
