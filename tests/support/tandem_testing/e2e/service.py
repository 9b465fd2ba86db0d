"""The service of the end-to-end tests: the bundled model in a size that fits a machine with two cores several times."""

from typing import Any

import msgspec

from tandem_operator.api.model_service import ModelServiceSpec
from tandem_operator.builders.served import Served, served
from tandem_operator.settings import OperatorSettings

NAME = "chat"
TAG = "e2e"
IMAGES = {f"{name}_image": f"localhost/tandem/{name}:{TAG}" for name in ("engine", "services", "redis")}
"""As tools/kube/build_images.sh names them; keywords of `OperatorSettings`."""

WORKER: dict[str, Any] = {"resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}}
SPEC: dict[str, Any] = {
    "model": {"path": "/opt/tandem/models/tandem-mini"},
    # float32: a greedy answer does not depend on what else is being served.
    "engine": {"dtype": "float32", "threads": 1, "kvCacheGib": 0.25, "pageSize": 16},
    "prefill": WORKER,
    "decode": WORKER,
    "gateway": {"replicas": 2, "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}},
    "redis": {"managed": {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}}},
    "drainSeconds": 60,
}


def service_in(namespace: str, spec: dict[str, Any]) -> Served:
    """As the operator would see it."""
    return served(NAME, namespace, msgspec.convert(spec, ModelServiceSpec), OperatorSettings(**IMAGES))
