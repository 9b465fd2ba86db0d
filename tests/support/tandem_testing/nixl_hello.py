"""What a peer says of a pool like our own, for tests of the transfer thread without NIXL."""

from tandem_engine.disaggregation.nixl.layout import Region
from tandem_engine.messages.requests import Peer
from tandem_engine.messages.transfer import Hello


def hello_like(region: Region, sender: Peer) -> Hello:
    """The `Hello` of `sender`, whose pool has the shape of `region` and lies somewhere else."""
    return Hello(
        sender=sender,
        nixl_metadata=b"",
        pool_address=1 << 41,
        page_bytes=region.page_bytes,
        num_pages=region.num_pages,
        heads=region.heads,
        device="DRAM",
        device_id=0,
        machine="m",
        transports=(),
    )
