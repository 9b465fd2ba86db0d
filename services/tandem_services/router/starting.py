"""Workers that start, as they report it in Redis until they are registered. For people alone: routing reads none of it.

A worker without an engine has no routing row. It writes what its engine does into one hash of its cluster, once a
heartbeat; a report that is not repeated is forgotten (`keys.STARTING_MS`). Reports are unsigned, as statistics are, and
malformed ones are left out.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from tandem_services.router.keys import MAX_STARTING, Keys
from tandem_services.router.redis_functions import FunctionLibrary

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class StartingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One that is not registered yet."""

    worker_id: _Text
    incarnation: _Text
    role: _Text
    model: _Text
    phase: _Text
    """`base.progress.Phase`, of its release."""
    done: _Count = 0
    total: _Count = 0
    """0: not known."""
    unit: _Text = ""
    """`bytes`, or "" for a count."""
    seconds: Annotated[float, msgspec.Meta(ge=0, lt=1e9)] = 0.0
    """Since its start."""


_WORKER = msgspec.json.Decoder(StartingWorker)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingBoard:
    """All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def report(self, worker: StartingWorker) -> None:
        """It starts."""
        await self.library.call("starting_report", (self.keys.starting,), worker.worker_id, msgspec.json.encode(worker))

    async def forget(self, worker_id: str) -> None:
        """It does not start any more."""
        await self.library.call("starting_report", (self.keys.starting,), worker_id, b"")

    async def read(self) -> tuple[StartingWorker, ...]:
        """Those that start now, by name."""
        texts = await self.library.ask("starting_list", (self.keys.starting,), shape=list[msgspec.Raw])
        found = (_worker(text) for text in texts[:MAX_STARTING])
        return tuple(sorted((each for each in found if each is not None), key=lambda each: each.worker_id))


def _worker(packed: msgspec.Raw) -> StartingWorker | None:
    """None for what no worker has written. Each is read by itself: bytes that are no text spoil one."""
    try:
        return _WORKER.decode(msgspec.msgpack.decode(packed, type=str))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
