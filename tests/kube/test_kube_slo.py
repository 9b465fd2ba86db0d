"""`spec.slo` as an operator's user meets it: `kubectl get`, `describe`, conditions, and values that are refused."""

import pytest
import yaml

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.custom_resources import model_service
from tandem_testing.waiting import wait_for

pytestmark = KUBE

SLO = {"ttftSeconds": 1.5, "itlSeconds": 0.03, "percentile": 0.9, "admission": "shed"}


def test_service_with_objectives_says_what_is_known(services, running):
    """No pod here has metrics: nothing is known, nothing fails, and no worker is removed."""
    services.apply(slo=SLO, autoscaling={"mode": "internal"})
    services.wait_ready()
    services.wait_condition("SloMet", "Unknown", "FewRequests")
    for kind in ("SloFeasible", "LatencyModelCalibrated"):
        assert services.condition(kind) == ("Unknown", "NoMetrics")
    (container,) = services.deployments()["chat-gateway"]["spec"]["template"]["spec"]["containers"]
    at = container["args"].index("--slo-ttft-ms")
    assert container["args"][at : at + 8] == [
        *("--slo-ttft-ms", "1500", "--slo-itl-ms", "30"),
        *("--slo-percentile", "0.9", "--slo-admission", "shed"),
    ]
    described = services.cluster.kubectl("-n", services.namespace, "describe", "modelservice", "chat")
    for text in ("Ttft Seconds:", "SloMet", "too few requests with objectives have ended", "LatencyModelCalibrated"):
        assert text in described
    services.apply(autoscaling={"mode": "internal"})
    wait_for(lambda: services.condition("SloMet") == ("", ""), PATIENCE_S, services.described)


def test_attainment_is_a_column_of_wide_output(control_plane, namespace):
    manifest = model_service(namespace, slo=SLO)
    control_plane.apply(manifest).raise_for_status()
    status = {"slo": {"attainment": 0.934, "goodputPerSecond": 12.5, "summary": "0.934/0.9"}}
    control_plane.merge(f"{control_plane.path(manifest)}/status", {"status": status}).raise_for_status()
    head, row = control_plane.kubectl("-n", namespace, "get", "ms", "-o", "wide").splitlines()
    assert "SLO" in head.split()
    assert "0.934/0.9" in row.split()
    assert "0.934/0.9" not in control_plane.kubectl("-n", namespace, "get", "ms")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"slo": {"ttftSeconds": 0}}, ["spec.slo.ttftSeconds", "greater than 0"]),
        ({"slo": {"ttftSeconds": "NaN"}}, ["spec.slo.ttftSeconds", "number"]),
        ({"slo": {"itlSeconds": -1}}, ["spec.slo.itlSeconds", "greater than 0"]),
        ({"slo": {"itlSeconds": 1e9}}, ["spec.slo.itlSeconds", "86400"]),
        ({"slo": {"ttftSeconds": 1, "percentile": 1}}, ["spec.slo.percentile", "less than or equal to 0"]),
        ({"slo": {"ttftSeconds": 1, "admission": "never"}}, ["spec.slo.admission", '"observe", "shed", "strict"']),
        ({"slo": {"ttftSeconds": 1, "ttft": 2}}, ["spec.slo", "unknown field", "ttft"]),
        ({"slo": {}}, ["spec.slo", "no objective; set ttftSeconds or itlSeconds"]),
        ({"gateway": {"processes": 0}}, ["spec.gateway.processes", "greater than or equal to 1"]),
        ({"gateway": {"processes": 9}}, ["spec.gateway.processes", "less than or equal to 8"]),
    ],
)
def test_bad_value_is_refused_by_kubectl_with_its_field(control_plane, namespace, spec, words, tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(model_service(namespace, **spec)), encoding="utf-8")
    with pytest.raises(AssertionError) as refused:
        control_plane.kubectl("apply", "-f", str(file))
    for word in words:
        assert word in str(refused.value)


def test_processes_above_the_cpu_limit_are_named_in_the_status(services, running):
    services.apply(gateway={"processes": 4, "resources": {"limits": {"cpu": "2", "memory": "4Gi"}}})
    services.wait_condition("Ready", "False", "InvalidSpec")
    (message,) = [one["message"] for one in services.get()["status"]["conditions"] if one["type"] == "Ready"]
    assert "spec.gateway.processes: 4 processes use 4 CPUs, and spec.gateway.resources.limits[cpu] is 2" in message
    assert services.deployments() == {}
    services.apply(gateway={"processes": 2, "resources": {"limits": {"cpu": "2", "memory": "4Gi"}}})
    services.wait_ready()
    (container,) = services.deployments()["chat-gateway"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][container["args"].index("--processes") + 1] == "2"
