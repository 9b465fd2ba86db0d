"""A ModelService as the builders use it: its identity, and its spec with every default filled in."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tandem_operator.api.engine import Engine
from tandem_operator.api.model_service import GROUP, VERSION, Images, ManagedRedis, ModelServiceSpec, Redis, Role
from tandem_operator.api.types import RoleName
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.engine_flags import Device, device_of, merged, nodes_of
from tandem_operator.builders.naming import cluster_name, curve_secret_name, labels_of, pool_name
from tandem_operator.settings import OperatorSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Make it with `served`, which fills in the defaults."""

    name: str
    namespace: str
    spec: ModelServiceSpec
    engine_images: Mapping[Device, str]
    """Of workers, where the spec names none."""

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


def served(name: str, namespace: str, spec: ModelServiceSpec, settings: OperatorSettings) -> Served:
    """Images and Redis from the operator's defaults where `spec` sets nothing."""
    images = Images(
        engine=spec.images.engine,
        services=spec.images.services or settings.services_image,
        redis=spec.images.redis or settings.redis_image,
        pull_policy=spec.images.pull_policy,
        pull_secrets=spec.images.pull_secrets,
    )
    redis = spec.redis
    if redis.external is None and redis.managed is None:
        redis = Redis(managed=ManagedRedis())
    return Served(
        name=name,
        namespace=namespace,
        spec=msgspec.structs.replace(spec, images=images, redis=redis),
        engine_images={"cpu": settings.engine_image, "cuda": settings.cuda_engine_image},
    )


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
