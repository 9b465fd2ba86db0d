"""`pod.patch` on a real API server: what it adds stays, and what is wrong with it changes nothing."""

from typing import Any

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.kube_services import Services
from tandem_testing.waiting import wait_equal

pytestmark = KUBE

VOLUME = {"name": "logs", "emptyDir": {}}
MOUNT = {"name": "logs", "mountPath": "/var/logs"}
SIDECAR = {"name": "shipper", "image": "shipper:1", "ports": [{"containerPort": 9999}], "volumeMounts": [MOUNT]}


def patch(**spec: Any) -> dict[str, Any]:
    return {"prefill": {"pod": {"patch": {"spec": spec}}}}


def containers(services: Services) -> dict[str, list[str]]:
    """Of the pods of prefill workers that stay, by pod."""
    return {
        pod["metadata"]["name"]: [one["name"] for one in pod["spec"]["containers"]]
        for pod in services.pods("worker")
        if pod["metadata"]["labels"]["tandem.dev/role"] == "prefill" and "deletionTimestamp" not in pod["metadata"]
    }


def generations(services: Services) -> dict[str, int]:
    return {name: one["metadata"]["generation"] for name, one in services.deployments().items()}


def test_sidecar_stays_and_a_wrong_patch_changes_nothing(services, running):
    """The API server fills defaults in, which are no difference to what was applied."""
    worker = {"name": "worker", "volumeMounts": [MOUNT]}
    good = {"containers": [worker, SIDECAR], "volumes": [VOLUME]}
    services.apply(**patch(**good))
    services.wait_ready()
    assert list(containers(services).values()) == [["worker", "shipper"]]
    before = generations(services)

    services.apply(**patch(**good, hostNetwork=True))
    services.wait_condition("Valid", "False", "InvalidSpec")
    unknown = {**SIDECAR, "nonsense": 1}
    services.apply(**patch(containers=[worker, unknown], volumes=[VOLUME]))
    services.wait_condition("Degraded", "True", "ApplyRefused")
    (message,) = [one["message"] for one in services.get()["status"]["conditions"] if one["type"] == "Degraded"]
    assert "nonsense" in message
    assert services.condition("Ready")[0] == "True"
    services.apply(**patch(**good))
    services.wait_condition("Degraded", "False", "AllWell")
    services.wait_ready()
    assert generations(services) == before

    services.apply()
    wait_equal(lambda: list(containers(services).values()), [["worker"]], PATIENCE_S, services.described)
