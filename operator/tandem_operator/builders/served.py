"""A ModelService as the builders use it: its identity, and its spec with every default filled in.

A ModelGateway has the same form, so that its gateways are built by the same functions: a service whose gateways are
`shared`, without workers and without a model (`served_gateway`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tandem_operator.api.engine import Engine
from tandem_operator.api.gateway import Gateway
from tandem_operator.api.model_gateway import ModelGatewaySpec
from tandem_operator.api.model_service import (
    GROUP,
    VERSION,
    Images,
    ManagedRedis,
    ModelServiceSpec,
    Redis,
    Role,
)
from tandem_operator.api.sources import ClaimSource, ModelSource
from tandem_operator.api.types import RoleName
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.engine_flags import Device, device_of, merged, nodes_of
from tandem_operator.builders.naming import (
    GATEWAY_LABEL,
    SERVICE_LABEL,
    Labels,
    cluster_name,
    curve_secret_name,
    labels_of,
    pool_name,
    shared_labels_of,
)
from tandem_operator.settings import OperatorSettings

FROM_ZERO_S = 540
"""At zero a request waits so long for the first pair: a little less than it may take altogether."""

CLAIMS_FOLDER = "/models"
"""In gateways of a ModelGateway: a folder for each of its claims."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Make it with `served`, which fills in the defaults."""

    name: str
    namespace: str
    spec: ModelServiceSpec
    engine_images: Mapping[Device, str]
    """Of workers, where the spec names none."""
    shared: bool = False
    """It is a ModelGateway."""
    cached: bool = False
    """Its model is on the claim of a ModelCache: `spec.model.claim` is the directory of one commit there."""
    claims: tuple[str, ...] = ()
    """Of a ModelGateway: the PersistentVolumeClaims that its gateways mount."""

    def labels(self, component: str) -> Labels:
        """Of its objects of a component."""
        return shared_labels_of(self.name, component) if self.shared else labels_of(self.name, component)

    @property
    def has_gateways(self) -> bool:
        """Whether gateways are created for it."""
        return self.spec.gateway_ref is None

    @property
    def pods_selector(self) -> Labels:
        """Selects all of its pods."""
        return {GATEWAY_LABEL if self.shared else SERVICE_LABEL: self.name}

    @property
    def cluster(self) -> str:
        """Name of its fleet within Redis."""
        return cluster_name(self.namespace, self.name)

    @property
    def model_name(self) -> str:
        """What clients call it."""
        return self.spec.served_model_name or self.name

    @property
    def services_image(self) -> str:
        """Image of the gateway."""
        return self.spec.images.services or ""

    @property
    def curve_secret(self) -> str:
        """Secret with the keys of the sockets, given or made."""
        return self.spec.security.curve_secret or curve_secret_name(self.name)

    def role(self, name: RoleName) -> Role:
        """Part of the spec for one role."""
        return self.spec.prefill if name == "prefill" else self.spec.decode

    def engine(self, name: RoleName) -> Engine:
        """Engine settings of one role: its own where it has any."""
        return merged(self.spec.engine, self.role(name).engine)

    def device(self, name: RoleName) -> Device:
        """What workers of one role run on."""
        return device_of(self.engine(name), self.role(name).resources)

    def nodes(self, name: RoleName) -> int:
        """Pods of one worker of a role."""
        return nodes_of(self.engine(name), self.role(name).resources)

    def engine_image(self, name: RoleName) -> str:
        """Image of the workers of one role."""
        return self.spec.images.engine or self.engine_images[self.device(name)]


def served(
    name: str, namespace: str, spec: ModelServiceSpec, settings: OperatorSettings, *, cache: ClaimSource | None = None
) -> Served:
    """Images and Redis from the operator's defaults where `spec` sets nothing.

    `cache`: of a spec with `cacheRef`, where the ModelCache has the commit that is served; None before there is one.
    """
    model = spec.model if cache is None else ModelSource(claim=cache)
    return Served(
        name=name,
        namespace=namespace,
        cached=cache is not None,
        spec=msgspec.structs.replace(
            spec, model=model, images=_images(spec.images, settings), redis=_redis(spec.redis)
        ),
        engine_images={"cpu": settings.engine_image, "cuda": settings.cuda_engine_image},
    )


def served_gateway(name: str, namespace: str, spec: ModelGatewaySpec, settings: OperatorSettings) -> Served:
    """A ModelGateway. It has a Redis only for the usage of keys."""
    gateway = Gateway(**{field: getattr(spec, field) for field in Gateway.__struct_fields__})
    return Served(
        name=name,
        namespace=namespace,
        spec=ModelServiceSpec(
            model=ModelSource(path=CLAIMS_FOLDER),
            gateway=gateway,
            images=_images(spec.images, settings),
            redis=Redis() if spec.auth_secret is None else _redis(spec.redis),
            drain_seconds=spec.drain_seconds,
            security=spec.security,
            observability=spec.observability,
        ),
        engine_images={},
        shared=True,
        claims=tuple(spec.claims),
    )


def _images(given: Images, settings: OperatorSettings) -> Images:
    return Images(
        engine=given.engine,
        services=given.services or settings.services_image,
        redis=given.redis or settings.redis_image,
        pull_policy=given.pull_policy,
        pull_secrets=given.pull_secrets,
    )


def _redis(given: Redis) -> Redis:
    return Redis(managed=ManagedRedis()) if given.external is None and given.managed is None else given


def worker_pool(service: Served, role: RoleName) -> Manifest:
    """The object without `replicas`: that field is written through the scale subresource alone, so that applying
    never takes it from an HPA, KEDA or `kubectl scale`.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "WorkerPool",
        "metadata": {
            "name": pool_name(service.name, role),
            "namespace": service.namespace,
            "labels": labels_of(service.name, "worker", role=role),
        },
        "spec": {"serviceName": service.name, "role": role},
    }


def may_be_zero(spec: ModelServiceSpec) -> bool:
    """Whether the autoscaler of the workers may remove all of them, and adds them when a request comes."""
    scaling = spec.autoscaling
    allowed = spec.prefill.scaling.min_replicas == 0 and spec.decode.scaling.min_replicas == 0
    return allowed and (scaling.mode == "external" or (scaling.mode == "internal" and scaling.idle_seconds_to_zero > 0))
