"""Names of things that travel through the engine, as distinct types.

Mixing up a page and a row, or a request and a room, is a type error instead of silent corruption.
"""

from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
"""One attempt at one choice of one client request; unique for the life of the fleet."""

ReqPoolIdx = NewType("ReqPoolIdx", int)
"""Row of a request in `ReqToTokenPool`. Row 0 is padding and belongs to no request."""

PageId = NewType("PageId", int)
"""Index of a page in the KV pool. Page 0 is the dummy page."""

HostPageId = NewType("HostPageId", int)
"""Index of a page in the host pool."""

Room = NewType("Room", str)
"""Meeting point of one prefill and one decode worker for one attempt at one request."""


class DigestKind(StrEnum):
    """What a digest of a page covers (`--kv-digest`)."""

    SAMPLED = "sampled"
    """Words of every layer and group of slots."""
    FULL = "full"
    """Every byte."""


class LinkTransport(StrEnum):
    """What carries KV between two workers."""

    TCP = "tcp"
    RDMA = "rdma"
    SHM = "shm"
    CUDA_IPC = "cuda_ipc"
    UNKNOWN = "unknown"
    """Several would work and nothing tells which one does."""


DUMMY_PAGE = PageId(0)
PADDING_ROW = ReqPoolIdx(0)
