"""Container images of a model service."""

from typing import Annotated, Literal

import msgspec

from tandem_operator.api.markers import Api, Image, Name


class Images(Api, frozen=True, kw_only=True):
    """Container images; what is not named is the operator's default of its own version."""

    engine: Image | None = None
    """Image of the workers, on whatever they run. Empty: the operator's for CPUs or the one for GPUs, by the role's
    `engine.device`."""
    services: Image | None = None
    """Image of the gateway."""
    redis: Image | None = None
    """Image of a managed Redis."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When images are pulled; empty: the cluster's rule."""
    pull_secrets: Annotated[list[Name], msgspec.Meta(max_length=8)] = []
    """Secrets with which they are pulled."""
