"""A reader of KV events: what the router's index would know."""

from collections.abc import Iterable

from tandem_engine.messages.kv_events import AllCleared, BlockRemoved, BlockStored, KvEvent


def replayed(events: Iterable[KvEvent], known: Iterable[bytes] = ()) -> set[bytes]:
    """The blocks known after `events`. A block stored twice or removed without being known is a bug."""
    known = {*known}
    for event in events:
        match event:
            case AllCleared():
                known.clear()
            case BlockStored(hashes=hashes):
                assert not known & {*hashes}, "stored twice"
                known |= {*hashes}
            case BlockRemoved(hashes=hashes):
                assert {*hashes} <= known, "removed but never stored"
                known -= {*hashes}
    return known
