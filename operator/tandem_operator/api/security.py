"""Who may talk to the pods of a model service, and as whom they run."""

from typing import Annotated, ClassVar

import msgspec

from tandem_operator.api.markers import Api, Labels, Name, Rule


class Security(Api, frozen=True, kw_only=True):
    """Who may talk to the pods."""

    network_policies: bool = True
    """Deny what the parts do not need: clients reach the gateway alone."""
    client_namespaces: Labels = {}
    """Labels of namespaces whose pods may reach the gateway; empty: all may."""
    run_as_user: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 10001
    """User and group of all containers; never root."""
    curve_secret: Name | None = None
    """Secret with the key file of the sockets between the parts (key `keys.json`); without it one is made. Cannot
    change: other keys are another ModelService."""

    RULES: ClassVar = (
        Rule(
            "has(self.curveSecret) == has(oldSelf.curveSecret) && "
            "(!has(self.curveSecret) || self.curveSecret == oldSelf.curveSecret)",
            "curveSecret cannot change: pods with other keys do not talk to those that run; make another ModelService",
        ),
    )
