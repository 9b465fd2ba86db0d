"""Cells of a ModelService: what gateways receive, which pods policies admit, and what cannot be combined."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceStatus
from tandem_operator.builders.gateway import gateway_deployment
from tandem_operator.builders.inference_pool import inference_pool
from tandem_operator.builders.policies import network_policies
from tandem_operator.planning.observed import Observed
from tandem_operator.planning.plan import make_plan, revision_of
from tandem_operator.planning.validation import problems_of
from tandem_operator.settings import ClusterApis, OperatorSettings
from tandem_services.cli.main import build_parser
from tandem_services.router.cells.places import read_places
from tandem_testing.kube_cluster import MINIMAL, service_of

CELLS: dict[str, Any] = {
    "servedModelName": "qwen",
    "security": {"curveSecret": "keys"},
    "cells": [{"service": "west"}],
}
EXTERNAL = {
    "url": "rediss+sentinel://user@sentinel.example:26380/main/0",
    "password": {"name": "west-redis-user", "key": "word"},
    "sentinelUser": "reader",
    "sentinelPassword": {"name": "west-sentinel", "key": "word"},
    "caSecret": {"name": "west-ca", "key": "ca.crt"},
}


def gateway_pod(**spec: Any) -> dict[str, Any]:
    return dict(gateway_deployment(service_of(**{**CELLS, **spec}))["spec"]["template"]["spec"])


def arguments(**spec: Any) -> list[str]:
    return list(gateway_pod(**spec)["containers"][0]["args"])


def cell_volumes(**spec: Any) -> dict[str, Any]:
    return {one["name"]: one for one in gateway_pod(**spec)["volumes"] if one["name"].startswith("cell-")}


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def problems(**spec: Any) -> list[str]:
    return problems_of(service_of(**{**CELLS, **spec}), ClusterApis())


def test_managed_redis_of_another_cell_is_named_to_gateways():
    words = arguments()
    assert value_of(words, "--cells") == "models.west=redis://west-redis:6379/0"
    assert value_of(words, "--cell-password-files") == "models.west=/etc/tandem/cells/west/password"
    (volume,) = cell_volumes().values()
    secret = volume["projected"]["sources"][0]["secret"]
    assert secret == {"name": "west-redis", "items": [{"key": "password", "path": "password"}], "optional": True}


def test_external_redis_of_another_cell_has_its_files():
    cells = [{"service": "west", "redis": EXTERNAL}]
    url = value_of(arguments(cells=cells), "--cells").partition("=")[2]
    assert "ssl_ca_certs=/etc/tandem/cells/west/ca.crt" in url
    assert "sentinel_password_file=/etc/tandem/cells/west/sentinel-password" in url
    sources = cell_volumes(cells=cells)["cell-0"]["projected"]["sources"]
    assert {one["secret"]["name"] for one in sources} == {"west-redis-user", "west-sentinel", "west-ca"}
    assert all(one["secret"]["optional"] for one in sources)


def test_flags_of_gateways_are_accepted_by_the_command():
    words = arguments(cells=[{"service": "west"}, {"service": "east", "redis": {"url": "redis://east.example"}}])
    args = build_parser().parse_args(["gateway", *words])
    places = read_places(args.cells, args.cell_password_files, own=args.cluster)
    assert [(place.name, place.password_file is not None) for place in places] == [
        ("models.west", True),
        ("models.east", False),
    ]


def test_workers_and_routers_know_nothing_of_cells():
    service = service_of(**CELLS, gateway={"inferencePool": {}})
    plan = make_plan(service, Observed(now="2026-01-01T00:00:00Z"), ModelServiceStatus(), 1, OperatorSettings())
    pods = [one for one in plan.apply if one["kind"] == "Deployment" and "gateway" not in one["metadata"]["name"]]
    pods += inference_pool(service)
    assert pods
    assert not [one["metadata"]["name"] for one in pods if "cell" in str(one["spec"])]


def test_other_cells_are_no_part_of_a_revision():
    without = {key: value for key, value in CELLS.items() if key != "cells"}
    assert revision_of(service_of(**CELLS)) == revision_of(service_of(**without))


def test_service_without_cells_has_none_in_its_gateway():
    words = gateway_deployment(service_of())["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [word for word in words if "cell" in word]


def policies(**spec: Any) -> dict[str, Any]:
    made = network_policies(service_of(**{**CELLS, **spec}), OperatorSettings())
    return {one["metadata"]["name"]: one["spec"] for one in made}


def test_policies_admit_gateways_of_other_cells_to_workers_and_redis():
    west = {"tandem.dev/service": "west", "app.kubernetes.io/component": "gateway"}
    admitted = {"podSelector": {"matchLabels": west}}
    ingress = {name: spec["ingress"] for name, spec in policies().items()}
    admitting = [name for name, rules in ingress.items() if any(admitted in rule.get("from", []) for rule in rules)]
    assert admitting == ["chat-worker", "chat-redis"]


def test_policies_let_gateways_alone_reach_other_cells():
    west = {"podSelector": {"matchLabels": {"tandem.dev/service": "west"}}}
    reach = {name: spec.get("egress", []) for name, spec in policies().items()}
    reaching = [name for name, rules in reach.items() if any(west in rule.get("to", []) for rule in rules)]
    assert reaching == ["chat-gateway"]


def test_policies_open_the_port_of_an_external_redis_to_gateways():
    cells = [{"service": "west", "redis": {"url": "redis://redis.example:7001"}}]
    opened = {
        name: {port["port"] for rule in spec.get("egress", []) if "to" not in rule for port in rule["ports"]}
        for name, spec in policies(cells=cells).items()
    }
    assert [name for name, ports in opened.items() if 7001 in ports] == ["chat-gateway"]


@pytest.mark.parametrize(
    ("spec", "field", "fix"),
    [
        ({"gatewayRef": {"name": "shared"}}, "spec.cells", "remove cells, or gatewayRef"),
        ({"servedModelName": None}, "spec.cells", "set spec.servedModelName"),
        ({"security": {}}, "spec.cells", "set spec.security.curveSecret"),
        ({"cells": [{"service": "chat"}]}, "spec.cells: 'chat'", "name the others alone"),
        ({"cells": [{"service": "west"}, {"service": "west"}]}, "spec.cells: 'west'", "remove all but one"),
        (
            {
                "autoscaling": {"mode": "internal", "idleSecondsToZero": 60},
                "prefill": {"scaling": {"minReplicas": 0}},
                "decode": {"scaling": {"minReplicas": 0}},
            },
            "spec.cells",
            "set minReplicas",
        ),
        ({"gateway": {"args": ["--cells=a=redis://a"]}}, "spec.gateway.args[0]", "set spec.cells"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_a_fix(spec, field, fix):
    (problem,) = problems(**spec)
    assert problem.startswith(field)
    assert fix in problem


def test_cells_of_the_example_are_served_and_name_each_other():
    file = Path(__file__).parents[4] / "examples/cells/chat.yaml"
    services = {one["metadata"]["name"]: one["spec"] for one in yaml.safe_load_all(file.read_text())}
    assert {name: [cell["service"] for cell in spec["cells"]] for name, spec in services.items()} == {
        "chat-west": ["chat-east"],
        "chat-east": ["chat-west"],
    }
    built = [service_of(spec, name=name) for name, spec in services.items()]
    assert [problems_of(service, ClusterApis()) for service in built] == [[], []]
    assert len({(service.model_name, service.curve_secret, revision_of(service)) for service in built}) == 1


def test_minimal_service_has_no_problems_of_cells():
    assert problems_of(service_of(MINIMAL), ClusterApis()) == []
