"""`ModelGateway`: gateways in front of several ModelServices of its namespace, which name it in `spec.gatewayRef`.

spec     the gateways, as in `spec.gateway` of a ModelService; what depends on a model is the default of its services
status   the services behind it, and those that it refuses
"""

from typing import Annotated, ClassVar

import msgspec

from tandem_operator.api.gateway import Gateway
from tandem_operator.api.model_service import NAME_RULES, Images, Observability, Redis, Security
from tandem_operator.api.types import Api, Conditions, Name


class ModelGatewaySpec(Gateway, frozen=True, kw_only=True):
    """The gateways."""

    claims: Annotated[list[Name], msgspec.Meta(max_length=32, extra_json_schema={"x-kubernetes-list-type": "set"})] = []
    """PersistentVolumeClaims with models, mounted read-only in all gateways: for the tokenizers of services whose model
    is on one of them. A change replaces the gateway pods one by one."""
    images: Images = Images()
    """Container images; `engine` has no effect here."""
    redis: Redis = Redis()
    """Redis in which all gateways count the usage of API keys. Used with `authSecret`."""
    drain_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 60
    """Seconds for running requests of a gateway that ends: not less than those of its services. Sets the grace period
    of pods."""
    security: Security = Security()
    """Network policies, user, and the key of the gateways' own orders."""
    observability: Observability = Observability()
    """Logs, traces and monitors."""

    RULES: ClassVar = (*Gateway.RULES,)


class ReferringService(Api, frozen=True, kw_only=True):
    """A ModelService that refers to this ModelGateway."""

    name: str
    """Its name."""
    models: Annotated[list[str], msgspec.Meta(max_length=32)] = []
    """Names that clients use; of one that is not served as its spec has it, those that it had before."""
    served: bool = False
    """Whether the gateways have been given it; the ModelService's `RouterReady` says whether they reach it."""
    reason: str = ""
    """CamelCase reason if it is not served, or not as its spec has it."""
    message: str = ""
    """Details, for people."""


class ModelGatewayStatus(Api, frozen=True, kw_only=True):
    """Observed state."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Conditions = []
    """Ready, and the conditions on which it depends."""
    ready: str = ""
    """Ready and desired gateways: for `kubectl get`."""
    endpoint: str = ""
    """Address for clients inside the cluster."""
    served: int = 0
    """Number of services that are served."""
    refused: int = 0
    """Number of services that are not."""
    error: str = ""
    """Short error: for `kubectl get`. Conditions have the details."""
    services: Annotated[list[ReferringService], msgspec.Meta(max_length=128)] = []
    """Services that refer to it, by name; at most 128."""


class ModelGateway(Api, frozen=True, kw_only=True):
    """Gateways in front of several ModelServices, which come and go without a restart of a gateway."""

    spec: ModelGatewaySpec = ModelGatewaySpec()
    """The gateways."""
    status: ModelGatewayStatus = ModelGatewayStatus()
    """Observed state, written by the operator."""

    RULES: ClassVar = NAME_RULES
