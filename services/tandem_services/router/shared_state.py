"""State that the gateways of a deployment share through Redis. Each board is a view of it with its own keys.

    FairBoard         virtual token counters, waiting tenants, and slots that a gateway leaves to others: one atomic
                      function (scripts/fair.lua)
    QuarantineBoard   digests of requests that no worker should run again. One bounded sorted set by expiry, in the time
                      of Redis, so that clocks of gateways do not matter; it expires when nothing is added
    TokenizerCopy     the tokenizer of a model, compressed; its digest is signed
    SessionBindings   which worker keeps which session
    UsageBoard        usage of tenants: one atomic function (scripts/usage.lua). A running request holds a lease that
                      its gateway renews, so requests of a dead gateway expire

States of a session:

    opened     its id is taken; no worker keeps anything yet
    bound      a worker computes the first turn, or has kept it since
    forgotten  closed, or unused for its time to live

A binding is a hint: only the worker can confirm that it still keeps the session, and it does so when a turn arrives.
Keys contain a digest of cache salt and id, so that clients can neither predict nor choose them.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from typing import Annotated

import msgspec

from tandem_engine.base.errors import CheckpointError
from tandem_engine.messages.control import HexDigest
from tandem_engine.tokenizer.bundle import MAX_BUNDLE_BYTES, PART_BYTES, TokenizerBundle
from tandem_services.common.redis_client import (
    RedisAddress,
    RedisClient,
    RedisUnavailableError,
    Reply,
    UnreadableReplyError,
    decoded,
)
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import LEASE_OF_REQUEST_MS, Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.usage_counters import Ask, Refused, Usage, UsageLimits


class _SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    floor: str
    values: list[tuple[str, str]]
    heads: list[tuple[str, str]] = msgspec.field(name="wishes")
    places: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """What one gateway did for one tenant since its last report."""

    tenant: str
    cost: float
    """Virtual tokens over the tenant's weight."""
    waits: bool
    """Something of it waits there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueHead:
    """Priority and tenant of the request that the next free slot of a gateway is for."""

    priority: int
    tenant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report of one gateway to the others."""

    gateway: str
    charges: Sequence[Charge]
    head: QueueHead | None = None
    left: int = 0
    """Places that it leaves to others."""
    wanted: int = 0
    """Places that it would take where others leave some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteHead:
    """Of another gateway."""

    priority: int
    value: float
    """Counter of the tenant that its next place is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Counters of all gateways together, and queue heads, at one moment."""

    values: dict[str, float]
    """Counters of the tenants in the report."""
    floor: float
    heads: tuple[RemoteHead, ...] = ()
    places: int = 0
    """That others have left, and that are the reporter's from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FairBoard:
    """Raises `RedisUnavailableError`; after the report has been added up, `UnreadableReplyError`, which is logged."""

    library: FunctionLibrary
    keys: Keys

    async def sync(self, report: Report) -> Standing:
        """Add its charges; returns where their tenants stand."""
        head = "" if report.head is None else f"{report.head.priority} {report.head.tenant}"
        args: list[str | int] = [report.gateway, head, report.left, report.wanted]
        for charge in report.charges:
            args += (charge.tenant, f"{charge.cost:.6f}", "1" if charge.waits else "0")
        reply = await self.library.ask("fair_sync", self.keys.fairness, *args, shape=_SyncReply)
        try:
            return Standing(
                values={tenant: _number(value) for tenant, value in reply.values},
                floor=_number(reply.floor),
                heads=tuple(_remote_head(priority, value) for priority, value in reply.heads),
                places=reply.places,
            )
        except ValueError as error:
            raise self.library.unreadable("fair_sync", error) from error


def _remote_head(priority: str, value: str) -> RemoteHead:
    return RemoteHead(priority=int(priority), value=_number(value))


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]!r} is no counter")
    return value


MAX_DIGEST_BYTES = 64

MAX_QUARANTINE_S = 86_400.0
"""Seconds. No entry lasts as long as a day. A later expiry was not written by Tandem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineBoard:
    """Reads and writes the set. All methods raise `RedisUnavailableError`."""

    client: RedisClient
    keys: Keys

    async def put(self, digest: str, *, ttl_s: float, capacity: int) -> None:
        """Remember `digest` for `ttl_s`; beyond `capacity` those that would be forgotten first go."""
        now = await self._now_ms()
        await self._drop_another_type()
        key = self.keys.quarantine
        await self.client.command("ZADD", key, now + int(ttl_s * 1000), digest)
        await self.client.command("ZREMRANGEBYRANK", key, 0, -capacity - 1)
        await self.client.command("PEXPIRE", key, int(ttl_s * 1000))

    async def digests(self) -> dict[str, float]:
        """Digest → seconds left. What is no digest is left out [redis-values-untrusted]."""
        now = await self._now_ms()
        await self._drop_another_type()
        entries = await self.client.command("ZRANGE", self.keys.quarantine, now, "+inf", "BYSCORE", "WITHSCORES")
        if not isinstance(entries, list):
            raise self._unreadable("ZRANGE", entries)
        found = {}
        for name, score in zip(entries[::2], entries[1::2], strict=False):
            if (
                isinstance(name, bytes)
                and name.isalnum()
                and len(name) <= MAX_DIGEST_BYTES
                and isinstance(score, bytes)
            ):
                found[name.decode("ascii")] = min((float(score) - now) / 1000, MAX_QUARANTINE_S)
        return found

    async def clear(self, digest: str | None = None) -> int:
        """Forget one digest, or all; returns how many there were."""
        if digest is not None:
            reply = await self.client.command("ZREM", self.keys.quarantine, digest)
            if not isinstance(reply, int):
                raise self._unreadable("ZREM", reply)
            return reply
        held = len(await self.digests())
        await self.client.command("UNLINK", self.keys.quarantine)
        return held

    async def _drop_another_type(self) -> None:
        """What is no sorted set would be refused by every command, for good."""
        if await self.client.command("TYPE", self.keys.quarantine) not in (b"zset", b"none"):
            await self.client.command("UNLINK", self.keys.quarantine)

    async def _now_ms(self) -> int:
        reply = await self.client.command("TIME")
        match reply:
            case (int() as seconds, int() as microseconds):
                return seconds * 1000 + microseconds // 1000
        raise self._unreadable("TIME", reply)

    def _unreadable(self, command: str, reply: Reply) -> UnreadableReplyError:
        return self.client.unreadable(f"the answer of {command} for {self.keys.quarantine}", repr(reply))


MAX_SESSION_TOKENS = 2**31
"""No context is so long, and no vocabulary so large. A binding with more was not written by Tandem."""


class SessionBinding(msgspec.Struct, frozen=True, array_like=True):
    """State of a session that gateways share."""

    incarnation: str | None = None
    """Incarnation of the worker that keeps the session; None before its first turn."""
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_SESSION_TOKENS)] = 0
    """Tokens of all turns."""
    last_token: Annotated[int, msgspec.Meta(ge=0, le=MAX_SESSION_TOKENS)] | None = None
    """The one it ends with; None while no turn has ended."""


_BINDING = msgspec.json.Decoder(SessionBinding)


class SessionName(msgspec.Struct, frozen=True):
    """Sessions belong to a cache salt, as cached prefixes do."""

    id: str
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionBindings:
    """Reads and writes bindings. All methods raise `RedisUnavailableError`."""

    client: RedisClient
    keys: Keys

    async def find(self, name: SessionName) -> SessionBinding | None:
        """None for one that was not opened, or that is forgotten; or whose binding cannot be read, which is logged."""
        key = self._key(name)
        value = await self.client.command("GET", key)
        if value is None:
            return None
        try:
            return decoded(value, _BINDING.decode)
        except ValueError as error:
            # Whatever its origin, the session cannot be found by it, at the next try either.
            self.client.unreadable("the binding of a session", f"{error}, at {key}")
            return None

    async def open(self, name: SessionName, *, ttl_s: float) -> bool:
        """Take the id. False when it is taken."""
        reply = await self.client.command("SET", self._key(name), _encoded(SessionBinding()), "NX", "PX", _ms(ttl_s))
        return reply is not None

    async def put(self, name: SessionName, binding: SessionBinding, *, ttl_s: float) -> None:
        """Write a binding, whether there is one or not."""
        await self.client.command("SET", self._key(name), _encoded(binding), "PX", _ms(ttl_s))

    async def update(self, name: SessionName, binding: SessionBinding, *, ttl_s: float) -> None:
        """Replace a binding; one that was closed in the meantime stays closed."""
        await self.client.command("SET", self._key(name), _encoded(binding), "XX", "PX", _ms(ttl_s))

    async def forget(self, name: SessionName) -> SessionBinding | None:
        """Remove and return what there was."""
        binding = await self.find(name)
        await self.client.command("UNLINK", self._key(name))
        return binding

    def _key(self, name: SessionName) -> str:
        digest = blake2b(msgspec.msgpack.encode(name), digest_size=16).hexdigest()
        return self.keys.session(digest)


def _encoded(binding: SessionBinding) -> bytes:
    return msgspec.json.encode(binding)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


class _TakeReply(msgspec.Struct, frozen=True, kw_only=True):
    refused: Refused
    second: int
    retry_ms: float
    requests: int
    requests_reset_ms: float
    tokens: int
    tokens_reset_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageBoard:
    """All methods raise `RedisUnavailableError`."""

    library: FunctionLibrary
    keys: Keys

    async def take(self, tenant: str, limits: UsageLimits, ask: Ask) -> Usage:
        """Grant `ask`, or say which limit is in its way."""
        reply = await self.library.ask(
            "usage_take",
            self.keys.usage_of(tenant),
            limits.requests,
            limits.tokens,
            limits.concurrency,
            ask.requests,
            ask.tokens,
            ask.lease,
            LEASE_OF_REQUEST_MS,
            shape=_TakeReply,
        )
        return Usage(
            refused=reply.refused,
            second=reply.second,
            retry_s=None if reply.retry_ms < 0 else reply.retry_ms / 1000,
            requests=reply.requests,
            requests_reset_s=reply.requests_reset_ms / 1000,
            tokens=reply.tokens,
            tokens_reset_s=reply.tokens_reset_ms / 1000,
        )

    async def settle(self, tenant: str, *, second: int, tokens: int, lease: str) -> None:
        """A request has ended: see `UsageWindows.settle`."""
        await self.library.call("usage_settle", self.keys.usage_of(tenant), second, tokens, lease)

    async def renew(self, tenant: str, leases: Iterable[str]) -> None:
        """Requests that still run. One that has ended in the meantime stays ended."""
        await self.library.call("usage_renew", self.keys.usage_of(tenant), LEASE_OF_REQUEST_MS, *leases)


logger = logging.getLogger(__name__)

COPY_COMMAND_S = 10.0
MAX_COPY_BYTES = 16 << 20
"""Of one copy in Redis. A tokenizer that is larger when it is compressed has no copy."""

MAX_COPY_HEADER_BYTES = 1024

COPY_TTL_MS = 30 * 86_400_000
"""Of a copy. Gateways renew it as long as one runs, also while there is no worker."""


class StoredTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """A copy as it lies in Redis."""

    digest: HexDigest
    proof: HexDigest
    """See `Deployment.tokenizer_proof`."""
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_COPY_BYTES)]
    """The bundle's, compressed by zlib."""


_STORED_TOKENIZER = msgspec.msgpack.Decoder(StoredTokenizer)


@dataclass(kw_only=True, slots=True)
class TokenizerCopy:
    """The tokenizer of one model, for gateways that start while there is no worker. Methods raise
    `RedisUnavailableError`.

        keep    a gateway that has the tokenizer of live workers writes it, if Redis has another one or none
        read    the signed digest, then the data: decompressed up to a bound, and compared with that digest

    An older copy that is written again is the tokenizer of former workers; the gateway replaces it as soon as a worker
    reports another one, and sends no request to workers with another one. Commands use a connection of their own,
    because a copy has megabytes and heartbeats must not wait for it.
    """

    redis: RedisAddress
    keys: Keys
    deployment: Deployment
    model: str
    _too_large: str = field(default="")
    """Digest of a tokenizer that has no copy for its size."""

    async def read(self) -> TokenizerBundle | None:
        """None where there is no copy of this deployment; what is there instead is logged."""
        stored = await self._stored()
        if stored is None:
            return None
        try:
            return await asyncio.to_thread(_unpacked_tokenizer, stored)
        except CheckpointError as error:
            logger.warning("ignored the tokenizer of %s in Redis: %s", self.model, error)
            return None

    async def keep(self, digest: str, read: Callable[[], TokenizerBundle]) -> None:
        """Write the bundle with this digest, unless Redis has it. `read`: in a thread. Raises as `read`, too."""
        if digest == self._too_large:
            return
        if await self._has(digest):
            return
        packed = await asyncio.to_thread(lambda: zlib.compress(read().data))
        if len(packed) > MAX_COPY_BYTES:
            self._too_large = digest
            logger.warning(
                "the tokenizer of %s has %d bytes when compressed, more than the %d that are kept in Redis: a gateway "
                "that starts while there is no worker waits for one",
                self.model,
                len(packed),
                MAX_COPY_BYTES,
            )
            return
        proof = self.deployment.tokenizer_proof(self.model, digest)
        written = msgspec.msgpack.encode(StoredTokenizer(digest=digest, proof=proof, data=packed))
        await self._send("SET", self.keys.tokenizer(self.model), written, "PX", COPY_TTL_MS)
        logger.info("wrote the tokenizer of %s to Redis (%d bytes)", self.model, len(written))

    async def _has(self, digest: str) -> bool:
        """Whether Redis has this copy, whole, which is then kept for `COPY_TTL_MS` more."""
        try:
            bundle = await self.read()
        except RedisUnavailableError:
            return False  # or the key has a value of another type, which is overwritten
        if bundle is None or bundle.digest != digest:
            return False
        await self._send("PEXPIRE", self.keys.tokenizer(self.model), COPY_TTL_MS)
        return True

    async def _stored(self) -> StoredTokenizer | None:
        """What a process of this deployment has written."""
        key = self.keys.tokenizer(self.model)
        size = await self._send("STRLEN", key)
        if not isinstance(size, int) or not 0 < size <= MAX_COPY_BYTES + MAX_COPY_HEADER_BYTES:
            return None
        try:
            stored = decoded(await self._send("GET", key), _STORED_TOKENIZER.decode)
        except ValueError:
            return None
        return stored if self.deployment.reported(self.model, stored.digest, proof=stored.proof) else None

    async def _send(self, *args: str | bytes | int) -> Reply:
        client = RedisClient(self.redis, timeout_s=COPY_COMMAND_S)
        try:
            return await client.command(*args)
        finally:
            await client.close()


def _unpacked_tokenizer(stored: StoredTokenizer) -> TokenizerBundle:
    """Raises `CheckpointError`."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(stored.data, MAX_BUNDLE_BYTES + PART_BYTES)
    except zlib.error as error:
        raise CheckpointError(f"it cannot be decompressed: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise CheckpointError(f"it is incomplete, or has more than {MAX_BUNDLE_BYTES} bytes")
    return TokenizerBundle.verified(data, stored.digest)
