"""Moves a page between two agents of one process: whether NIXL and UCX work on this machine.

    python -m tandem_engine.disaggregation.nixl.loopback

prints one line. Errors are those of the agent, with exit status 1.
"""

import sys
import time

import numpy as np

from tandem_engine.base.errors import EngineError
from tandem_engine.base.names import PageId
from tandem_engine.disaggregation.nixl.agent import Interfaces, NixlAgent
from tandem_engine.disaggregation.nixl.layout import Region, describe

PAGE_BYTES = 1 << 16
PAUSE_S = 0.001


def move_a_page() -> float:
    """Returns the seconds of the transfer. Raises `TransportUnavailableError`, `TransferError`."""
    source = np.arange(PAGE_BYTES, dtype=np.uint8)
    target = np.zeros(PAGE_BYTES, dtype=np.uint8)
    regions = [Region(int(data.ctypes.data), PAGE_BYTES, 1, "DRAM", 0) for data in (source, target)]
    page = PageId(0)
    names = ("loopback-source", "loopback-target")
    sender, receiver = (NixlAgent(name, region, Interfaces()) for name, region in zip(names, regions, strict=True))
    try:
        sender.add_peer(names[1], receiver.metadata)
        began = time.monotonic()
        write = sender.write(names[1], describe(regions[0], [page], regions[1], [page]), "DRAM")
        while not sender.progress(write):
            receiver.attend()
            time.sleep(PAUSE_S)
        sender.release(write)
    finally:
        receiver.close()
        sender.close()
    if not np.array_equal(source, target):
        raise EngineError("a page arrived with other bytes than were sent")
    return time.monotonic() - began


def main() -> int:
    try:
        seconds = move_a_page()
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"NIXL moved {PAGE_BYTES >> 10} KiB between two agents in {1000 * seconds:.1f} ms\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
