"""Redis of a model service: registry and prefix index. Never the only copy of anything."""

from typing import Annotated, ClassVar

import msgspec

from tandem_operator.api.markers import Api, Rule
from tandem_operator.api.pods import PodOverrides, Resources, SecretKey


class ManagedRedis(Api, frozen=True, kw_only=True):
    """One pod with a generated password, without a disk: workers republish its contents after a loss."""

    resources: Resources = Resources(requests={"cpu": "250m", "memory": "512Mi"}, limits={"memory": "1Gi"})
    """Its resources. The index of a million cached blocks takes about 100 MiB."""
    pod: PodOverrides = PodOverrides()
    """Changes to its pod."""


class ExternalRedis(Api, frozen=True, kw_only=True):
    """An existing Redis (7 or later) or Valkey; several services may share it."""

    url: Annotated[
        str, msgspec.Meta(pattern=r"^rediss?://([-._a-zA-Z0-9]+@)?[-._a-zA-Z0-9\[\]:]+(/[0-9]+)?$", max_length=512)
    ]
    """redis:// or rediss:// for TLS, with the ACL user before an @. No password."""
    password: SecretKey | None = None
    """Its password."""
    ca_secret: SecretKey | None = None
    """Certificate authority of a rediss:// address, PEM; default: those of the image."""

    RULES: ClassVar = (
        Rule("!has(self.caSecret) || self.url.startsWith('rediss://')", "caSecret is for TLS: a url with rediss://"),
    )


class Redis(Api, frozen=True, kw_only=True):
    """Managed, or external."""

    managed: ManagedRedis | None = None
    """A Redis only for this service; the default."""
    external: ExternalRedis | None = None
    """An existing Redis."""

    RULES: ClassVar = (Rule("!(has(self.managed) && has(self.external))", "give managed or external, not both"),)
