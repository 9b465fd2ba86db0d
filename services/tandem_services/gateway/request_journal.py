"""The records of recent requests (`explain`), by our id and by the client's own.

opened   the record is an object, which the running request fills
closed   the journal keeps its MessagePack bytes instead: less than half the memory, and a size that is known
dropped  the oldest record, when there are more than `capacity`; the oldest closed one, when all closed ones together
         have more than `max_bytes`

Requests that were refused before they were accepted have `REFUSED_RECORDS` places for themselves: however many there
are, they drop no accepted one.
"""

import re
from collections import OrderedDict
from itertools import islice

import msgspec

from tandem_services.gateway.explain import RequestRecord

JOURNAL_BYTES = 16 << 20
REFUSED_RECORDS = 256
"""Kept of requests that were refused, the newest."""
ENTRY_BYTES = 512
"""What an entry takes beside its record: its ids, and its places in two dictionaries."""
_ANSWER_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestRecord).decode


class _Entry(msgspec.Struct, gc=False):
    tenant: str
    client_request_id: str | None
    record: RequestRecord | bytes

    def read(self) -> RequestRecord:
        return _decode(self.record) if isinstance(self.record, bytes) else self.record

    @property
    def size(self) -> int:
        """Bytes of a closed one; 0 of others, which belong to the running request."""
        return len(self.record) + ENTRY_BYTES if isinstance(self.record, bytes) else 0


class RequestJournal:
    """At most `capacity` records, and `max_bytes` of closed ones. One per gateway; belongs to its event loop."""

    def __init__(self, capacity: int, *, max_bytes: int = JOURNAL_BYTES) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._refused: OrderedDict[str, _Entry] = OrderedDict()
        self.accepted_total = 0
        self.bytes = 0
        """Of closed records."""
        self._aliases: dict[tuple[str, str], str] = {}
        """Tenant and its own id → ours: tenants cannot take each other's ids."""

    def open(self, record: RequestRecord) -> None:
        self.accepted_total += 1
        self._entries[record.request_id] = _Entry(record.tenant, record.client_request_id, record)
        if record.client_request_id is not None:
            self._aliases[record.tenant, record.client_request_id] = record.request_id
        while len(self._entries) > self._capacity:
            self._drop(next(iter(self._entries)))

    def close(self, record: RequestRecord) -> None:
        """`record` does not change from now on. Does nothing when it was dropped before."""
        entry = self._entries.get(record.request_id)
        if entry is None or entry.record is not record:
            return
        entry.record = _encode(record)
        self.bytes += entry.size
        while self.bytes > self._max_bytes:
            self._drop(next(request_id for request_id, each in self._entries.items() if each.size))

    def refuse(self, record: RequestRecord) -> None:
        """A request that was answered with an error. One that was accepted has a record, which has the error."""
        if record.request_id in self._entries:
            return
        self._refused[record.request_id] = _Entry(record.tenant, record.client_request_id, _encode(record))
        if len(self._refused) > REFUSED_RECORDS:
            self._refused.popitem(last=False)

    def find(self, request_id: str, *, tenant: str = "") -> RequestRecord | None:
        """Of one tenant: by our id, by the id of the answer (`chatcmpl-…`, `cmpl-…`, `resp_…`, `msg_…`), or by the
        client's own.

        Of several requests with the same client id, the newest.
        """
        entry = self._entry(request_id) or self._entries.get(self._aliases.get((tenant, request_id), ""))
        entry = entry or self._refused_as(request_id, tenant)
        return entry.read() if entry is not None and entry.tenant == tenant else None

    def find_anybodys(self, request_id: str) -> RequestRecord | None:
        """As `find`, of all tenants."""
        entry = self._entry(request_id)
        if entry is None:
            ours = next((ours for (_, theirs), ours in self._aliases.items() if theirs == request_id), "")
            entry = self._entries.get(ours) or self._refused_as(request_id, None)
        return None if entry is None else entry.read()

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        open_records = (entry.record for entry in self._entries.values() if isinstance(entry.record, RequestRecord))
        return sum(record.e2e_s is None for record in open_records)

    def latest(self, number: int) -> list[RequestRecord]:
        """Of all tenants, newest first."""
        return [entry.read() for entry in islice(reversed(self._entries.values()), number)]

    def latest_refused(self, number: int) -> list[RequestRecord]:
        """Of all tenants, newest first."""
        return [entry.read() for entry in islice(reversed(self._refused.values()), number)]

    def _entry(self, request_id: str) -> _Entry | None:
        ours = _ANSWER_PREFIX.sub("", request_id)
        return self._entries.get(ours) or self._refused.get(ours)

    def _refused_as(self, client_request_id: str, tenant: str | None) -> _Entry | None:
        """The newest refused request that a client gave this id. `tenant` None: any."""
        return next(
            (
                entry
                for entry in reversed(self._refused.values())
                if entry.client_request_id == client_request_id and tenant in (None, entry.tenant)
            ),
            None,
        )

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self.bytes -= entry.size
        alias = (entry.tenant, entry.client_request_id or "")
        if self._aliases.get(alias) == request_id:
            del self._aliases[alias]
