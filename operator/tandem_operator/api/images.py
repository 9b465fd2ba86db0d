"""Container images of a model service."""

from typing import Annotated, Literal

import msgspec

from tandem_operator.api.markers import Api, Image, Name


class Images(Api, frozen=True, kw_only=True):
    """Container images; by default those of the operator's version."""

    engine: Image | None = None
    """Image of the workers of both roles. Empty: the operator's image for CPUs or for GPUs, by the role's
    `engine.device`."""
    services: Image | None = None
    """Image of the gateway."""
    redis: Image | None = None
    """Image of a managed Redis."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When images are pulled; empty: the cluster's default."""
    pull_secrets: Annotated[list[Name], msgspec.Meta(max_length=8)] = []
    """Secrets for pulling images."""
