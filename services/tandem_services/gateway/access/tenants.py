"""Tenants: who may use the gateway, and how much of it. One entry of the key file each (docs/limits.md)."""

from typing import Annotated

import msgspec

from tandem_services.router.usage_windows import UsageLimits

MAX_COUNT = 10**12

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]
Priority = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is known about the holders of one entry's keys."""

    name: Name
    """In logs, metrics and Redis keys."""
    sha256: tuple[Digest, ...]
    """Digests of its keys: one, or two while they are exchanged."""
    models: tuple[str, ...] | None = None
    """What it may use; absent: every model."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and output tokens."""
    concurrency: Count | None = None
    """Requests at once."""
    weight: Weight = 1.0
    """Its share of the fleet while there is not enough for all."""
    priority: Priority = 0
    """The most that its requests may ask for; greater goes first."""
    share_cache: bool = False
    """Its prompts may be found in the prefix cache by other tenants that share, and theirs by it."""
    parse_special_tokens: bool = True
    """Special tokens in its text prompts become control tokens; otherwise they are plain text."""
    admin: bool = False
    """It may use admin routes."""

    @property
    def limits(self) -> UsageLimits:
        return UsageLimits(
            requests=self.requests_per_minute or 0,
            tokens=self.tokens_per_minute or 0,
            concurrency=self.concurrency or 0,
        )


EVERYBODY = ""
"""Name of the one tenant there is without a key file. No entry can have it."""
