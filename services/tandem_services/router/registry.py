"""The registry in Redis: which workers exist, with which lease, load and statistics.

    1. A worker sends its load with every heartbeat, and its whole description with the first one, when it changes, from
       time to time, and when Redis lacks it. Any heartbeat registers a worker again after Redis lost its data.
    2. The reply contains whether the lease holds or this incarnation is fenced, which workers joined and left since the
       last heartbeat (all of them, where that is not known), and the revision of this worker's index.
    3. Gateways and workers read what has changed (`fleet_reader`). An epoch number distinguishes an empty registry (all
       workers left) from a wiped one (all workers are about to return).

Statistics for display (`figures`) are part of the description, and routing does not use them.

All content of Redis is untrusted. A record, claim or verdict without a valid signature, or with malformed values, is
counted and dropped. Malformed statistics are dropped without their worker.
"""

import secrets
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

import msgspec

from tandem_engine.base.release import UNSTATED
from tandem_engine.config import Role
from tandem_engine.messages.stats import LinkReport
from tandem_services.router.cost import ASSUMED_TRANSFER_RATE, Load, token_s
from tandem_services.router.decision import WorkerView
from tandem_services.router.deployment import PROOF_FIELD, Deployment
from tandem_services.router.keys import Keys, worker_id_of
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.row_values import (
    MAX_LABEL,
    kept_figures,
    positive,
    read_adapter_memory,
    read_adapters,
    read_digest,
    read_endpoint,
    read_http_address,
    read_incarnation,
    read_links,
    read_measure,
    read_number,
    read_size,
    read_step_fit,
)

ROW = struct.Struct("<BBII8s16s7d")
"""The routing row after its Redis times; its fields are documented in scripts/fleet_row.lua."""

ADAPTERS_FIELD = "adapters"
"""Of the readable hash. A worker of a release without it serves no adapter."""

ADAPTER_MEMORY_FIELD = "adapter_memory"
"""The same: where adapters are. Without it, those of `ADAPTERS_FIELD` are in memory, and no others can be loaded."""

STEP_FIT_FIELD = "step_fit"
"""The same: how long its steps take. Without it, only their recent mean is known."""

TOKENIZER_FIELD = "tokenizer"
"""The same: digest of the tokenizer's files. A worker without it sends none."""

ENCODING_FIELD = "encoding"
"""The same: digest of `tokenizer.json` alone. Without it, the worker's ids are not compared."""

DESCRIBED_FIELD = "described"
"""Of the readable hash: `description_digest`. When it changes, readers read the worker again."""

KIND_HASH = 12
"""Characters of the compat hash that stand for the revision in `WorkerRecord.kind`."""

_ROLE_BITS = {Role.PREFILL: 1, Role.DECODE: 2, Role.BOTH: 3}


class WorkerState(StrEnum):
    """The state that a worker reports. Only `READY` is offered."""

    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    """Its scheduler loop does not turn."""
    PAUSED = "paused"
    """An operator has paused generation."""
    STANDBY = "standby"
    """Its revision has not been tested yet: it serves requests that name it, such as a canary."""


class LeaseStatus(StrEnum):
    RENEWED = "renewed"
    FENCED = "fenced"
    """A process of the deployment has signed its end: a newer one has the name, or peers found it dead.
    Final: the process must end."""
    FULL = "full"
    """The registry has as many workers as it takes (`MAX_WORKERS`)."""


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
    kind: str = field(init=False, repr=False, compare=False)
    """Workers of one kind take equally long for the same: revision, device and number of ranks."""

    def __post_init__(self) -> None:
        device, ranks = (str(self.details.get(name, "?"))[:MAX_LABEL] for name in ("device", "tp_size"))
        kind = f"{self.view.compat_hash[:KIND_HASH]}/{device}/tp{ranks}"
        object.__setattr__(self, "kind", kind)
        known = (link for link in self.links if link.broken or link.bytes_per_s > 0.0)
        rates = {link.peer: 0.0 if link.broken else link.bytes_per_s for link in known}
        object.__setattr__(self, "link_rates", rates)


class _HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    status: LeaseStatus
    verdict: str = ""
    epoch: str = ""
    generation: int = 0
    cursor: int = -1
    workers: int = 0
    undescribed: bool = False
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    members: tuple[str, ...] | None = None
    dropped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatReply:
    """What a process of this deployment has not signed is left out of it."""

    status: LeaseStatus
    by: str = ""
    """The signer of the verdict, when this incarnation is fenced."""
    forged: str = ""
    """A verdict that no process of this deployment has signed stands in the way of the lease: name it in the next
    heartbeat, which takes it away."""
    epoch: str = ""
    generation: int = 0
    cursor: int = -1
    """Revision of this worker's index, −1 when there is none."""
    workers: int = 0
    """Size of the fleet."""
    undescribed: bool = False
    """Redis lacks the description of this worker: the next heartbeat has to bring it."""
    joined: tuple[str, ...] = ()
    """Incarnations that joined or changed since the generation of the caller."""
    left: tuple[str, ...] = ()
    """Incarnations that left since then. Unsigned: a hint."""
    members: tuple[str, ...] | None = None
    """All registered incarnations, when it is not known what has changed since then."""


_ROW = msgspec.msgpack.Decoder(tuple[str, ...])


class _ChangesReply(msgspec.Struct, frozen=True, kw_only=True):
    epoch: str
    generation: int
    dropped: int
    changed: tuple[str, ...] | None = None
    listed: tuple[str, ...] | None = None
    workers: tuple[msgspec.Raw, ...]
    """Each decoded by itself: bytes that are no text spoil one row."""
    fenced: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChanges:
    """What a reader has missed. Unsigned names are hints; records are signed."""

    epoch: str
    generation: int
    changed: frozenset[str] | None
    """Incarnations that joined, changed, lapsed or left; None: any may have."""
    listed: frozenset[str] | None
    """All live incarnations, if they were requested or `changed` is None."""
    workers: tuple[WorkerRecord, ...]
    """Those of the requested descriptions that are live."""
    malformed: int
    """Number of malformed values, in Redis or in its reply."""
    fenced: frozenset[str] = frozenset()
    """Incarnations of the query that have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endings:
    """Of some incarnations."""

    ended: frozenset[str] = frozenset()
    for_memory: frozenset[str] = frozenset()
    """Those of them that the kernel killed because memory was short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """Calls the registry functions. All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys
    deployment: Deployment = field(default_factory=Deployment)

    async def heartbeat(
        self,
        record: WorkerRecord,
        *,
        known_generation: int,
        report_age_s: float,
        forged: str = "",
        describe: bool = True,
    ) -> HeartbeatReply:
        """Register or renew. `report_age_s`: how long ago the load in `record` was measured; `forged`: of the last
        reply; `describe`: write the readable fields and the links."""
        incarnation, described = record.view.incarnation, description_digest(record)
        texts = self._signed_fields(record, described) if describe else {}
        reply = await self.library.ask(
            "heartbeat",
            self.keys.shared,
            self.keys.prefix,
            incarnation,
            self.deployment.claim(incarnation),
            secrets.token_hex(8),
            known_generation,
            pack_row(record),
            int(report_age_s * 1000),
            pack_links(record) if describe else "",
            forged,
            described,
            *(part for field in texts.items() for part in field),
            shape=_HeartbeatReply,
        )
        return self._checked(reply, incarnation)

    def _signed_fields(self, record: WorkerRecord, described: str) -> dict[str, str]:
        texts = {name: _text(value) for name, value in readable_fields(record).items()}
        written = {**texts, "incarnation": record.view.incarnation, DESCRIBED_FIELD: described}
        return texts | {PROOF_FIELD: self.deployment.row_proof(written)}

    async def fence(self, incarnation: str, *, by: str, for_memory: bool = False) -> None:
        """It cannot come back: it leaves, or `by` has found it dead. `for_memory`: see `Deployment.verdict`."""
        verdict = self.deployment.verdict(incarnation, by=by, for_memory=for_memory)
        await self.library.call("fence", self.keys.shared, self.keys.prefix, incarnation, verdict)

    async def deregister(self, incarnation: str, *, for_memory: bool = False) -> None:
        """Leave at once. The incarnation cannot come back."""
        await self.fence(incarnation, by=incarnation, for_memory=for_memory)

    async def changes(
        self, since: int, *, listed: bool = False, described: Collection[str] = (), missing: Iterable[str] = ()
    ) -> FleetChanges:
        """What has changed since generation `since` (0: not known).

        `listed`: list all live incarnations. `described`: at most `MAX_DESCRIBED` incarnations to describe. `missing`:
        incarnations of the caller that no list contains, to learn whether they have ended.
        """
        reply = await self.library.ask(
            "changes",
            self.keys.shared,
            self.keys.prefix,
            secrets.token_hex(8),
            since,
            int(listed),
            len(described),
            *described,
            *missing,
            shape=_ChangesReply,
        )
        records = [self._signed_record(row) for row in reply.workers]
        sound = tuple(record for record in records if record is not None)
        return FleetChanges(
            epoch=reply.epoch,
            generation=reply.generation,
            changed=None if reply.changed is None else frozenset(reply.changed),
            listed=None if reply.listed is None else frozenset(reply.listed),
            workers=sound,
            malformed=reply.dropped + len(records) - len(sound),
            fenced=self._endings(reply.fenced).ended,
        )

    async def endings(self, incarnations: Iterable[str]) -> Endings:
        """How these have ended, as far as a process of this deployment has signed."""
        verdicts = await self.library.ask(
            "endings", self.keys.shared, self.keys.prefix, *incarnations, shape=tuple[tuple[str, str], ...]
        )
        return self._endings(verdicts)

    def _endings(self, verdicts: Iterable[tuple[str, str]]) -> Endings:
        signed = [each for each in verdicts if self.deployment.condemner(each[1], each[0]) is not None]
        return Endings(
            ended=frozenset(name for name, _ in signed),
            for_memory=frozenset(name for name, verdict in signed if self.deployment.was_for_memory(verdict, name)),
        )

    def _signed_record(self, row: msgspec.Raw) -> WorkerRecord | None:
        try:
            flat = _ROW.decode(row)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        return read_record(fields) if self.deployment.wrote(fields) else None

    def _checked(self, reply: _HeartbeatReply, incarnation: str) -> HeartbeatReply:
        if reply.status is LeaseStatus.FENCED:
            by = self.deployment.condemner(reply.verdict, incarnation)
            return HeartbeatReply(status=reply.status, by=by or "", forged="" if by else reply.verdict)
        return HeartbeatReply(
            status=reply.status,
            epoch=reply.epoch,
            generation=reply.generation,
            cursor=reply.cursor,
            workers=reply.workers,
            undescribed=reply.undescribed,
            joined=self._claimants(reply.joined),
            left=reply.left,
            members=None if reply.members is None else self._claimants(reply.members),
        )

    def _claimants(self, claims: Iterable[str]) -> tuple[str, ...]:
        claimed = (self.deployment.claimant(claim) for claim in claims)
        return tuple(incarnation for incarnation in claimed if incarnation is not None)


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


def description_digest(record: WorkerRecord) -> str:
    """16 hex digits of what readers need at once: everything but load, statistics and rates of links."""
    broken = sorted(link.peer for link in record.links if link.broken)
    description = msgspec.json.encode((record.view, record.state, broken), order="deterministic")
    return blake2b(description, digest_size=8).hexdigest()


def pack_links(record: WorkerRecord) -> str:
    """What the routing function reads about the links from a worker: see `links` in `keys`."""
    return "\n".join(f"{peer} {token_s(record.load, rate)!r}" for peer, rate in record.link_rates.items())


def readable_fields(record: WorkerRecord) -> dict[str, str | int | float]:
    """The hash `worker:<worker_id>`; the script adds incarnation and number."""
    view, load = record.view, record.load
    adapters = msgspec.json.encode(tuple(view.adapters.values())).decode() if view.adapters else None
    memory = view.adapter_memory
    if memory is not None and (view.adapters or memory.loads):
        placed = {ADAPTER_MEMORY_FIELD: msgspec.json.encode(memory).decode()}
    else:
        placed = {}
    return {
        **record.details,
        **({} if adapters is None else {ADAPTERS_FIELD: adapters}),
        **placed,
        "role": view.role,
        "state": record.state,
        "model": view.model,
        "request_endpoint": view.request_endpoint,
        "peer_endpoint": view.peer_endpoint,
        **({"health_endpoint": view.health_endpoint} if view.health_endpoint else {}),
        **({TOKENIZER_FIELD: view.tokenizer} if view.tokenizer else {}),
        **({ENCODING_FIELD: view.encoding} if view.encoding else {}),
        "compat_hash": view.compat_hash,
        "release": view.release,
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
        "step_base_s": load.step_base_s,
        "kv_tokens": load.kv_tokens,
        **({} if load.step_fit is None else {STEP_FIT_FIELD: msgspec.json.encode(load.step_fit).decode()}),
        "transfer_bytes_per_s": load.transfer_rate,
        "links": msgspec.json.encode(record.links).decode(),
    }


def _text(value: str | float) -> str:
    """As the Redis client would write it, so that it is signed as it is read back."""
    return str(value) if isinstance(value, str) else repr(value)


def read_record(fields: Mapping[str, str]) -> WorkerRecord | None:
    """The inverse of `readable_fields`; None for a hash that is not a worker of ours."""
    try:
        incarnation = read_incarnation(fields["incarnation"])
        worker_id = worker_id_of(incarnation)
        view = WorkerView(
            worker_id=worker_id,
            incarnation=incarnation,
            role=Role(fields["role"]),
            request_endpoint=read_endpoint(fields["request_endpoint"]),
            peer_endpoint=read_endpoint(fields["peer_endpoint"]),
            compat_hash=fields["compat_hash"],
            context_length=read_size(fields["context_length"]),
            page_size=read_size(fields["page_size"]),
            model=fields["model"],
            release=read_number(fields.get("release", str(UNSTATED))),
            adapters=read_adapters(fields.get(ADAPTERS_FIELD, "[]")),
            adapter_memory=read_adapter_memory(fields.get(ADAPTER_MEMORY_FIELD, "")),
            health_endpoint=read_http_address(fields.get("health_endpoint", "")),
            tokenizer=read_digest(fields.get(TOKENIZER_FIELD, "")),
            encoding=read_digest(fields.get(ENCODING_FIELD, "")),
        )
        load = Load(
            queue_tokens=read_measure(fields, "queue_tokens"),
            prefill_rate=positive(read_measure(fields, "prefill_tokens_per_s")),
            sequences=read_measure(fields, "sequences"),
            step_s=read_measure(fields, "decode_step_s"),
            room_tokens=read_measure(fields, "room_tokens"),
            max_sequences=positive(read_measure(fields, "max_sequences")),
            token_bytes=read_measure(fields, "token_bytes"),
            host_token_s=read_measure(fields, "host_token_s") if "host_token_s" in fields else 0.0,
            step_base_s=read_measure(fields, "step_base_s") if "step_base_s" in fields else 0.0,
            step_fit=read_step_fit(fields.get(STEP_FIT_FIELD, "")),
            kv_tokens=read_measure(fields, "kv_tokens") if "kv_tokens" in fields else 0.0,
            transfer_rate=read_measure(fields, "transfer_bytes_per_s") or ASSUMED_TRANSFER_RATE,
        )
        links = read_links(fields.get("links", "[]"))
        state = WorkerState(fields["state"])
        return WorkerRecord(view=view, state=state, load=load, details=kept_figures(fields), links=links)
    except (KeyError, ValueError):
        return None
