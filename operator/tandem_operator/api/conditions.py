"""Conditions of a resource, as in Kubernetes."""

from typing import Annotated, Literal

import msgspec

from tandem_operator.api.markers import Api


class Condition(Api, frozen=True, kw_only=True):
    """One aspect of the state."""

    type: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """The aspect."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """CamelCase reason, for programs."""
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Details, for people."""
    last_transition_time: str = ""
    """When the status last changed, RFC 3339."""
    observed_generation: int = 0
    """Generation of the spec that it describes."""


Conditions = Annotated[
    list[Condition],
    msgspec.Meta(
        max_length=16,
        extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]
