"""Conditions of a resource, as Kubernetes has them everywhere."""

from typing import Annotated, Literal

import msgspec

from tandem_operator.api.markers import Api


class Condition(Api, frozen=True, kw_only=True):
    """One thing that is so, or not, or not known."""

    type: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """What it is about."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    reason: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=64)]
    """One word, for programs."""
    message: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """A sentence, for people."""
    last_transition_time: str = ""
    """When the status last changed, RFC 3339."""
    observed_generation: int = 0
    """The generation of the spec that it speaks of."""


Conditions = Annotated[
    list[Condition],
    msgspec.Meta(
        max_length=16,
        extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]
