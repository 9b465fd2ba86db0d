"""Objectives of a spec reach the gateways that serve it."""

from tandem_operator.builders.gateway import gateway_deployment
from tandem_testing.kube_cluster import service_of

SLO = {"ttftSeconds": 1.5, "itlSeconds": 0.03, "percentile": 0.9, "admission": "shed"}


def words(**spec):
    return gateway_deployment(service_of(**spec))["spec"]["template"]["spec"]["containers"][0]["args"]


def test_objectives_are_flags_of_the_gateway():
    given = words(slo=SLO)
    at = given.index("--slo-ttft-ms")
    assert given[at : at + 8] == [
        *("--slo-ttft-ms", "1500", "--slo-itl-ms", "30"),
        *("--slo-percentile", "0.9", "--slo-admission", "shed"),
    ]
    assert not any(word.startswith("--slo") for word in words())
    assert "--slo-itl-ms" not in words(slo={"ttftSeconds": 1})
