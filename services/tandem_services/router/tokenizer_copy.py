"""TokenizerCopy: the tokenizer of one model in Redis, for gateways that start while there is no worker.

    keep    a gateway that has the tokenizer of live workers writes it, if Redis has another one or none
    read    the signed digest, then the data: decompressed up to a bound, and compared with that digest

Redis is untrusted: a copy counts if a process of the deployment has signed its digest for this model and its content
has that digest. An older copy that is written again is the tokenizer of former workers; the gateway replaces it as soon
as a worker reports another one, and sends no request to workers with another one.

Commands use a connection of their own, because a copy has megabytes and heartbeats must not wait for it.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from tandem_engine.base.errors import CheckpointError
from tandem_engine.messages.control import HexDigest
from tandem_engine.tokenizer.bundle import MAX_BUNDLE_BYTES, PART_BYTES, TokenizerBundle
from tandem_services.common.redis_client import RedisAddress, RedisClient, RedisUnavailableError, Reply, decoded
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys

logger = logging.getLogger(__name__)

COMMAND_S = 10.0
MAX_STORED_BYTES = 16 << 20
"""Of one copy in Redis. A tokenizer that is larger when it is compressed has no copy."""

MAX_HEADER_BYTES = 1024

TTL_MS = 30 * 86_400_000
"""Of a copy. Gateways renew it as long as one runs, also while there is no worker."""


class StoredTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """A copy as it lies in Redis."""

    digest: HexDigest
    proof: HexDigest
    """See `Deployment.tokenizer_proof`."""
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_STORED_BYTES)]
    """The bundle's, compressed by zlib."""


_STORED = msgspec.msgpack.Decoder(StoredTokenizer)


@dataclass(kw_only=True, slots=True)
class TokenizerCopy:
    """Of one model. Methods raise `RedisUnavailableError`, and belong to one event loop."""

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
            return await asyncio.to_thread(_unpacked, stored)
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
        if len(packed) > MAX_STORED_BYTES:
            self._too_large = digest
            logger.warning(
                "the tokenizer of %s has %d bytes when compressed, more than the %d that are kept in Redis: a gateway "
                "that starts while there is no worker waits for one",
                self.model,
                len(packed),
                MAX_STORED_BYTES,
            )
            return
        proof = self.deployment.tokenizer_proof(self.model, digest)
        written = msgspec.msgpack.encode(StoredTokenizer(digest=digest, proof=proof, data=packed))
        await self._send("SET", self.keys.tokenizer(self.model), written, "PX", TTL_MS)
        logger.info("wrote the tokenizer of %s to Redis (%d bytes)", self.model, len(written))

    async def _has(self, digest: str) -> bool:
        """Whether Redis has this copy, which is then kept for `TTL_MS` more."""
        try:
            stored = await self._stored()
        except RedisUnavailableError:
            return False  # or the key has a value of another type, which is overwritten
        if stored is None or stored.digest != digest:
            return False
        await self._send("PEXPIRE", self.keys.tokenizer(self.model), TTL_MS)
        return True

    async def _stored(self) -> StoredTokenizer | None:
        """What a process of this deployment has written."""
        key = self.keys.tokenizer(self.model)
        size = await self._send("STRLEN", key)
        if not isinstance(size, int) or not 0 < size <= MAX_STORED_BYTES + MAX_HEADER_BYTES:
            return None
        try:
            stored = decoded(await self._send("GET", key), _STORED.decode)
        except ValueError:
            return None
        return stored if self.deployment.reported(self.model, stored.digest, proof=stored.proof) else None

    async def _send(self, *args: str | bytes | int) -> Reply:
        client = RedisClient(self.redis, timeout_s=COMMAND_S)
        try:
            return await client.command(*args)
        finally:
            await client.close()


def _unpacked(stored: StoredTokenizer) -> TokenizerBundle:
    """Raises `CheckpointError`."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(stored.data, MAX_BUNDLE_BYTES + PART_BYTES)
    except zlib.error as error:
        raise CheckpointError(f"it cannot be decompressed: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise CheckpointError(f"it is incomplete, or has more than {MAX_BUNDLE_BYTES} bytes")
    return TokenizerBundle.verified(data, stored.digest)
