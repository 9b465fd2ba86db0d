"""Digests of requests that no worker should see again, for all gateways of a deployment.

One sorted set holds them, by the time at which they may be forgotten. The time is Redis's own, so that clocks of
gateways do not matter. It is bounded, and goes by itself when nothing is added.
"""

from dataclasses import dataclass

from tandem_services.common.redis_client import RedisClient, Reply, UnreadableReplyError
from tandem_services.router.keys import Keys

MAX_DIGEST_BYTES = 64
MOST_LEFT = 86_400.0
"""Seconds. Nothing is put there for as long as a day. A later end was written by something else."""


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
                found[name.decode("ascii")] = min((float(score) - now) / 1000, MOST_LEFT)
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
