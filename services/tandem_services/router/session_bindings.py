"""Which worker keeps which conversation, for all gateways of a deployment to see.

    opened     an id is taken; no worker keeps anything yet
    bound      a worker computes its first turn, or keeps it since
    forgotten  closed, or not used for its time to live

A binding is a hint: the worker alone knows whether it still keeps the session, and says so when a turn arrives.
Keys hold a digest of cache salt and id, so that clients can neither guess nor shape them.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import msgspec

from tandem_services.common.redis_client import RedisClient
from tandem_services.common.redis_replies import decoded
from tandem_services.router.keys import Keys

MOST_TOKENS = 2**31
"""No context is so long, and no vocabulary so large. A binding with more was written by something else."""


class SessionBinding(msgspec.Struct, frozen=True, array_like=True):
    """What gateways know of a session."""

    incarnation: str | None = None
    """Of the worker that keeps it; None before its first turn."""
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    """Of all its turns."""
    last_token: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None = None
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
        """None for one that nobody opened, or that is forgotten; or whose binding cannot be read, which is logged."""
        key = self._key(name)
        value = await self.client.command("GET", key)
        if value is None:
            return None
        try:
            return decoded(value, _BINDING.decode)
        except ValueError as error:
            # Whoever wrote it, the session cannot be found by it, at the next try either.
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
        """Replace a binding; one that was closed meanwhile stays closed."""
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
