"""The WorkerPools of a ModelService: one per role, under names that stay while revisions come and go."""

from tandem_operator.api.model_service import GROUP, VERSION
from tandem_operator.api.roles import RoleName
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import labels_of, pool_name
from tandem_operator.builders.served import Served


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
