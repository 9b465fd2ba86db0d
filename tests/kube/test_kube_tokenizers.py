"""Gateway pods without the model's volume, as the API server has them."""

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.waiting import wait_for

pytestmark = KUBE

CLAIM = {"claim": {"claimName": "weights", "path": "llama"}}


def pod_of_gateway(services) -> dict:
    path = f"/apis/apps/v1/namespaces/{services.namespace}/deployments/chat-gateway"
    wait_for(lambda: services.cluster.api.get(path).status_code == 200, PATIENCE_S, services.described)
    return services.cluster.get(path)["spec"]["template"]["spec"]


def test_gateway_pods_have_no_model_volume(services, running):
    services.apply(model=CLAIM)
    pod = pod_of_gateway(services)
    assert [one for one in pod["volumes"] if "persistentVolumeClaim" in one] == []
    assert "initContainers" not in pod
    assert pod["containers"][0]["args"][:2] == ["--model", "fleet"]


def test_gateway_pods_have_the_model_where_the_spec_requires_it(services, running):
    services.apply(model=CLAIM, gateway={"tokenizer": "model"})
    pod = pod_of_gateway(services)
    [volume] = [one for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert volume["persistentVolumeClaim"]["claimName"] == "weights"
    assert pod["containers"][0]["args"][:2] == ["--model", "/models/llama"]
