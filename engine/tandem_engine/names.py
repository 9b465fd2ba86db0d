"""Names of things that travel through the engine, as distinct types.

Mixing up a page and a slot, or a row and a room, is a type error instead of silent corruption.
"""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One attempt at one choice of one client request; unique for the life of the fleet."""

ReqPoolIdx = NewType("ReqPoolIdx", int)
"""Row of a request in `ReqToTokenPool`. Row 0 is padding and belongs to nobody."""

PageId = NewType("PageId", int)
"""Index of a page in the KV pool. Page 0 is the dummy page."""

Slot = NewType("Slot", int)
"""Position of one token in the KV pool: `page * page_size + offset`."""

Room = NewType("Room", str)
"""Meeting point of one prefill and one decode worker for one attempt at one request."""

Incarnation = NewType("Incarnation", str)
"""`worker_id@number`: a worker process, not a worker address. A restart is a new incarnation."""

DUMMY_PAGE = PageId(0)
PADDING_ROW = ReqPoolIdx(0)
