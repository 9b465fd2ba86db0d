"""PodMonitors name ports that the pods have, and find them."""

from typing import Any

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.gateway import gateway_deployment
from tandem_operator.builders.policies import pod_monitors
from tandem_operator.builders.worker import worker_deployment
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_testing.kube_cluster import service_of

WATCHED = service_of(observability={"serviceMonitor": True})


def test_each_monitor_finds_its_pods_and_a_port_of_theirs():
    pods: dict[str, Any] = {
        "chat-gateway": gateway_deployment(WATCHED)["spec"]["template"],
        "chat-worker": worker_deployment(WATCHED, "decode", "0abc", 1)["spec"]["template"],
    }
    for monitor in pod_monitors(WATCHED):
        template = pods.pop(monitor["metadata"]["name"])
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert not pods


def test_pod_monitors_are_made_only_where_they_are_requested():
    def made(there: bool, **spec: Any) -> int:
        settings = OperatorSettings(apis=ClusterApis(pod_monitors=there), allow=frozenset({"monitors"}))
        plan = make_plan(service_of(**spec), Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, settings)
        return sum(one["kind"] == "PodMonitor" for one in plan.apply)

    wanted = {"serviceMonitor": True}
    assert made(True, observability=wanted) == 2
    assert made(True) == 0
    assert made(False) == 0
