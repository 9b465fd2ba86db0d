"""The registry: who is there, with what lease, told to and by Redis.

    1. A worker sends its whole description and load with every heartbeat, so the first one registers and any
       one re-registers after Redis lost everything. Nothing has to be remembered about what was sent.
    2. The answer says whether the lease holds, was lost to a newer incarnation (fenced), or belongs to another
       deployment; which incarnations exist, when that changed; and where the index of this worker stands.
    3. Gateways read a snapshot once a heartbeat. An epoch number tells an empty registry (everybody left)
       from a wiped one (everybody is about to come back).

What is read back is untrusted: a record that does not make sense is counted and left out.
"""

import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import inf, isfinite
from typing import Annotated, TypeVar

import msgspec

from tandem_engine.addresses import Address
from tandem_engine.config import Role
from tandem_engine.messages.control import MAX_LINKS
from tandem_engine.messages.engine_stats import LinkReport
from tandem_services.common.redis_client import Argument
from tandem_services.router.choice import WorkerView
from tandem_services.router.cost import ASSUMED_TRANSFER_RATE, Load, token_s
from tandem_services.router.figures import kept_figures
from tandem_services.router.keys import Keys
from tandem_services.router.library import FunctionLibrary

ROW = struct.Struct("<BBII8s16s7d")
"""The routing row after its Redis times; its fields are documented in scripts/fleet_row.lua."""

_ROLE_BITS = {Role.PREFILL: 1, Role.DECODE: 2, Role.BOTH: 3}

_Links = Annotated[tuple[LinkReport, ...], msgspec.Meta(max_length=MAX_LINKS)]


class WorkerState(StrEnum):
    """What a worker says about itself. Only `READY` is offered."""

    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    """Its scheduler loop does not turn."""
    PAUSED = "paused"
    """An operator has paused generation."""
    STANDBY = "standby"
    """Its revision has not been tried yet: it serves who names it, such as a canary."""


class LeaseStatus(StrEnum):
    RENEWED = "renewed"
    FENCED = "fenced"
    """A newer incarnation has the name, or this one was silent for too long. Final: the process must end."""
    FOREIGN = "foreign"
    """Another deployment uses this cluster name on this Redis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """One worker as it reports itself: what it is, and how it is doing."""

    view: WorkerView
    state: WorkerState
    load: Load
    details: Mapping[str, str | int | float]
    """Further readable fields for people and the operator; none takes part in routing. Of one that was read back the
    `figures` alone."""
    links: tuple[LinkReport, ...] = ()
    """To its peers, as its engine has measured them; at most `MAX_LINKS`."""

    link_rates: Mapping[str, float] = field(init=False, repr=False, compare=False)
    """Bytes per second by the receiver's incarnation; 0 for a broken link. Links without a figure are left out."""

    def __post_init__(self) -> None:
        known = (link for link in self.links if link.broken or link.bytes_per_s > 0.0)
        rates = {link.peer: 0.0 if link.broken else link.bytes_per_s for link in known}
        object.__setattr__(self, "link_rates", rates)


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    status: LeaseStatus
    by: str = ""
    """Who holds the name, when the lease was not renewed."""
    epoch: str = ""
    generation: int = 0
    cursor: int = -1
    """Revision of this worker's index, −1 when there is none."""
    members: tuple[str, ...] | None = None
    """Incarnations that are not fenced, when the generation differs from the caller's."""
    dropped: int = 0


class _SnapshotReply(msgspec.Struct, frozen=True, kw_only=True):
    epoch: str
    generation: int
    dropped: int
    workers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSnapshot:
    epoch: str
    workers: tuple[WorkerRecord, ...]
    rubbish: int
    """Values that made no sense, in Redis or on the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """Calls the registry functions. All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def heartbeat(
        self, record: WorkerRecord, *, deployment: str, known_generation: int, report_age_s: float
    ) -> HeartbeatReply:
        """Register or renew. `report_age_s`: how long ago the load in `record` was measured."""
        fields: list[Argument] = []
        for name, value in readable_fields(record).items():
            fields += (name, value)
        return await self.library.ask(
            "heartbeat",
            self.keys.shared,
            self.keys.prefix,
            record.view.incarnation,
            deployment,
            secrets.token_hex(8),
            known_generation,
            pack_row(record),
            int(report_age_s * 1000),
            pack_links(record),
            *fields,
            shape=HeartbeatReply,
        )

    async def deregister(self, incarnation: str) -> None:
        """Leave at once. The incarnation cannot come back."""
        await self.library.call("deregister", self.keys.shared, self.keys.prefix, incarnation)

    async def snapshot(self) -> FleetSnapshot:
        """All live workers, draining and stalled ones included."""
        reply = await self.library.ask(
            "snapshot", self.keys.shared, self.keys.prefix, secrets.token_hex(8), shape=_SnapshotReply
        )
        records = [read_record(dict(zip(flat[::2], flat[1::2], strict=False))) for flat in reply.workers]
        sound = tuple(record for record in records if record is not None)
        return FleetSnapshot(epoch=reply.epoch, workers=sound, rubbish=reply.dropped + len(records) - len(sound))


def model_digest(model: str) -> bytes:
    """8 bytes that stand for a model name in routing rows and queries."""
    return blake2b(model.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def pack_row(record: WorkerRecord) -> bytes:
    """What the routing function reads about a worker."""
    view, load = record.view, record.load
    return ROW.pack(
        _ROLE_BITS[view.role],
        record.state is WorkerState.READY,
        view.page_size,
        view.context_length,
        model_digest(view.model),
        blake2b(view.compat_hash.encode(), digest_size=16).digest(),
        load.queue_tokens,
        1.0 / load.prefill_rate,
        load.sequences,
        load.step_s,
        load.room_tokens,
        load.max_sequences,
        load.token_bytes / load.transfer_rate,
    )


def pack_links(record: WorkerRecord) -> str:
    """What the routing function reads about the links from a worker: see `links` in `keys`."""
    return "\n".join(f"{peer} {token_s(record.load, rate)!r}" for peer, rate in record.link_rates.items())


def readable_fields(record: WorkerRecord) -> dict[str, str | int | float]:
    """The hash `worker:<worker_id>`; the script adds incarnation and number."""
    view, load = record.view, record.load
    return {
        **record.details,
        "role": view.role,
        "state": record.state,
        "model": view.model,
        "request_endpoint": view.request_endpoint,
        "peer_endpoint": view.peer_endpoint,
        "compat_hash": view.compat_hash,
        "context_length": view.context_length,
        "page_size": view.page_size,
        "queue_tokens": load.queue_tokens,
        "prefill_tokens_per_s": load.prefill_rate,
        "sequences": load.sequences,
        "decode_step_s": load.step_s,
        "room_tokens": load.room_tokens,
        "max_sequences": load.max_sequences,
        "token_bytes": load.token_bytes,
        "host_token_s": load.host_token_s,
        "transfer_bytes_per_s": load.transfer_rate,
        "links": msgspec.json.encode(record.links).decode(),
    }


def read_record(fields: Mapping[str, str]) -> WorkerRecord | None:
    """The inverse of `readable_fields`; None for a hash that is not a worker of ours."""
    try:
        incarnation = fields["incarnation"]
        worker_id, _, _ = incarnation.rpartition("@")
        view = WorkerView(
            worker_id=worker_id,
            incarnation=incarnation,
            role=Role(fields["role"]),
            request_endpoint=_endpoint(fields["request_endpoint"]),
            peer_endpoint=_endpoint(fields["peer_endpoint"]),
            compat_hash=fields["compat_hash"],
            context_length=_positive(int(fields["context_length"])),
            page_size=_positive(int(fields["page_size"])),
            model=fields["model"],
        )
        load = Load(
            queue_tokens=_measure(fields, "queue_tokens"),
            prefill_rate=_positive(_measure(fields, "prefill_tokens_per_s")),
            sequences=_measure(fields, "sequences"),
            step_s=_measure(fields, "decode_step_s"),
            room_tokens=_measure(fields, "room_tokens"),
            max_sequences=_positive(_measure(fields, "max_sequences")),
            token_bytes=_measure(fields, "token_bytes"),
            host_token_s=_measure(fields, "host_token_s") if "host_token_s" in fields else 0.0,
            transfer_rate=_measure(fields, "transfer_bytes_per_s") or ASSUMED_TRANSFER_RATE,
        )
        links = _links(fields.get("links", "[]"))
        state = WorkerState(fields["state"])
        return WorkerRecord(view=view, state=state, load=load, details=kept_figures(fields), links=links)
    except (KeyError, ValueError):
        return None


def _endpoint(text: str) -> str:
    """`text`, which an engine says that it listens at. Anything else would reach ZMQ, which has more transports."""
    if not Address.of_endpoint(text).port:
        raise ValueError(f"{text[:200]!r} has no port")
    return text


def _links(text: str) -> tuple[LinkReport, ...]:
    try:
        links = msgspec.json.decode(text, type=_Links)
    except msgspec.DecodeError as error:
        raise ValueError(f"links: {error}") from error
    if not all(0.0 <= link.bytes_per_s < inf for link in links):
        raise ValueError("a link has no sensible rate")
    return links


def _measure(fields: Mapping[str, str], name: str) -> float:
    value = float(fields[name])
    if not isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}")
    return value


_Number = TypeVar("_Number", int, float)


def _positive(value: _Number) -> _Number:
    if value <= 0:
        raise ValueError(f"{value} is not positive")
    return value
