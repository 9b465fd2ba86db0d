"""Access to the pods of a model service, and their user."""

from typing import Annotated, ClassVar

import msgspec

from tandem_operator.api.markers import Api, Labels, Name, Port, Rule


class EgressRule(Api, frozen=True, kw_only=True):
    """A destination outside of the service that its pods may reach."""

    cidr: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=49)] | None = None
    """Addresses, such as 10.0.0.0/8; default: all."""
    ports: Annotated[list[Port], msgspec.Meta(max_length=16)] = []
    """TCP ports; empty: all ports of all protocols."""


class Security(Api, frozen=True, kw_only=True):
    """Network policies, users and keys."""

    network_policies: bool = True
    """Deny all connections that the components do not need: clients reach only the gateway."""
    egress: Annotated[list[EgressRule], msgspec.Meta(max_length=16)] = []
    """Additional destinations that the network policies allow for workers, gateways and routers. Always allowed are
    each other, DNS and, if the spec names them, an external Redis, the collector of traces and the Hugging Face hub
    (port 443)."""
    client_namespaces: Labels = {}
    """Labels of namespaces whose pods may reach the gateway; empty: all may."""
    run_as_user: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 10001
    """User and group of all containers; never root."""
    curve_secret: Name | None = None
    """Secret with the key file of the sockets between the components (key `keys.json`); default: one is created. It
    cannot change: other keys require another ModelService."""

    RULES: ClassVar = (
        Rule(
            "has(self.curveSecret) == has(oldSelf.curveSecret) && "
            "(!has(self.curveSecret) || self.curveSecret == oldSelf.curveSecret)",
            "curveSecret cannot change: pods with other keys do not talk to those that run; make another ModelService",
        ),
    )
