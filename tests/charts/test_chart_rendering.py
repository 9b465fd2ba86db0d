"""Both charts rendered by Helm itself, over a matrix of values and clusters: what comes out is valid, safe and minimal.

Strict validation against the schemas of each supported release finds what an API server would drop without a word.
"""

import json
import re
from typing import Any

import msgspec
import pytest
import yaml

from tandem_operator.api.model_service import ModelServiceSpec
from tandem_operator.builders.naming import labels_of, shared_labels_of
from tandem_testing.api_schemas import all_errors, supported_releases
from tandem_testing.helm_library import CHARTS, NEEDS_HELM, ROOT, HelmError, HelmLibrary
from tandem_testing.operator_objects import examples
from tandem_testing.pod_security import violations

pytestmark = [NEEDS_HELM, pytest.mark.xdist_group("helm")]

EVERYTHING: dict[str, Any] = {
    "scope": "Namespaces",
    "namespaces": ["models", "chat", "models"],
    "replicas": 3,
    "image": {"repository": "registry.example/t/operator", "digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
    "imagePullSecrets": ["registry"],
    "modelImages": {"engine": "r/e:1", "services": "r/s:1", "redis": "r/r:1"},
    "logLevel": "debug",
    "serviceAccount": {"annotations": {"example.com/role": "x"}},
    "podLabels": {"team": "serving"},
    "podAnnotations": {"example.com/scrape": "yes"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
            }
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "tandem"}},
        }
    ],
    "priorityClassName": "system-cluster-critical",
    "networkPolicy": {
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}],
        "apiServerPorts": [6443],
    },
    "metrics": {"monitor": "ServiceMonitor", "monitorLabels": {"release": "prometheus"}, "interval": "15s"},
    "dashboards": {"enabled": True, "namespace": "monitoring", "annotations": {"grafana_folder": "LLM"}},
}
OPERATOR_CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "cluster": {"scope": "Cluster"},
    "pod-monitor": {"metrics": {"monitor": "PodMonitor", "port": 9000}},
    "single": {"replicas": 1},
    "without": {
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "there"},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
}
each_case = pytest.mark.parametrize("case", OPERATOR_CASES)


@pytest.fixture(scope="module")
def rendered(helm) -> dict[str, list[dict[str, Any]]]:
    return {case: helm.render("tandem", values) for case, values in OPERATOR_CASES.items()}


@pytest.fixture(scope="module")
def rendered_models(helm) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The spec of each ModelService of all examples, and the manifest that it becomes. Helm compiles the chart's schema
    each time, for two seconds.
    """
    specs = [one["spec"] for one in examples() if one["kind"] == "ModelService"]
    return [(spec, model_service(helm, spec)) for spec in specs]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in manifests if one["kind"] == kind]


def deployment(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = of_kind(manifests, "Deployment")
    return one


@pytest.mark.parametrize("chart", ["tandem", "tandem-model"])
def test_charts_pass_lint(helm, chart):
    linted = helm.ask("lint", chart=str(CHARTS / chart))
    assert not linted["Errors"]
    # 1: that an icon is recommended. 2 and above are warnings and errors.
    assert {message["Severity"] for message in linted["Messages"]} <= {1}


@pytest.mark.parametrize("release", supported_releases())
def test_manifests_are_strictly_valid(rendered, rendered_models, release):
    """All cases, which clusters of all releases get alike: the next two tests."""
    for case, manifests in rendered.items():
        assert all_errors(manifests, release) == [], case
    assert all_errors([manifest for _, manifest in rendered_models], release) == []


def test_templates_ask_a_cluster_only_for_its_disruption_budgets():
    """What is rendered for one release is then what every supported release gets: all of them serve policy/v1."""
    read = [
        found
        for chart in ("tandem", "tandem-model")
        for file in sorted((CHARTS / chart / "templates").rglob("*"))
        if file.is_file()
        for found in re.findall(r"\.Capabilities[\w.]*(?: \"[^\"]*\")?|\blookup\b|\bsemverCompare\b", file.read_text())
    ]
    assert set(read) == {'.Capabilities.APIVersions.Has "policy/v1"'}


def test_oldest_and_newest_release_get_the_same_manifests(helm, rendered, rendered_models):
    for release in (supported_releases()[0], supported_releases()[-1]):
        for case, values in OPERATOR_CASES.items():
            assert helm.render("tandem", values, kube=f"{release}.0") == rendered[case], case
        spec, manifest = rendered_models[0]
        assert model_service(helm, spec, kube=f"{release}.0") == manifest


@each_case
def test_pods_meet_the_restricted_standard(rendered, case):
    template = deployment(rendered[case])["spec"]["template"]
    assert violations(template) == []
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        one["name"] for one in template["spec"]["volumes"]
    }


@each_case
def test_every_object_is_labelled_and_found(rendered, case):
    labels = deployment(rendered[case])["spec"]["template"]["metadata"]["labels"]
    for manifest in rendered[case]:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        spec = manifest.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector"))
        if selector is not None:
            assert selector.get("matchLabels", selector).items() <= labels.items(), manifest["kind"]


@each_case
def test_rendered_objects_have_unique_names(rendered, case):
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered[case]]
    assert len(set(names)) == len(names)


def test_probe_ports_are_ports_of_the_container(rendered):
    (container,) = deployment(rendered["pod-monitor"])["spec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": 9000}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"


def test_operators_namespace_alone_by_default(rendered):
    """No right outside of the release's namespace unless a value asks for it."""
    bound = of_kind(rendered["defaults"], "RoleBinding")
    assert {one["metadata"]["namespace"] for one in bound} == {"tandem-system"}
    assert not of_kind(rendered["defaults"], "ClusterRoleBinding")


def test_each_listed_namespace_has_its_role(rendered):
    roles = [one for one in of_kind(rendered["everything"], "Role") if one["metadata"]["name"] == "tandem-operator"]
    bindings = of_kind(rendered["everything"], "RoleBinding")
    assert [one["metadata"]["namespace"] for one in roles] == ["chat", "models"]
    assert [one["metadata"]["namespace"] for one in bindings if one["metadata"]["name"] == "tandem-operator"] == [
        "chat",
        "models",
    ]
    assert {one["subjects"][0]["namespace"] for one in bindings} == {"tandem-system"}


def test_every_binding_has_its_role_and_account(rendered):
    for manifests in rendered.values():
        accounts = {one["metadata"]["name"] for one in of_kind(manifests, "ServiceAccount")}
        roles = {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in manifests}
        for binding in of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding"):
            role = binding["roleRef"]
            namespace = binding["metadata"].get("namespace") if role["kind"] == "Role" else None
            assert (role["kind"], namespace, role["name"]) in roles
            assert {one["name"] for one in binding["subjects"]} <= accounts


def test_pods_run_as_the_account_that_is_bound(rendered):
    for case, account in (("defaults", "tandem"), ("without", "there")):
        assert deployment(rendered[case])["spec"]["template"]["spec"]["serviceAccountName"] == account


def test_account_that_is_not_made_has_to_be_named(helm):
    with pytest.raises(HelmError, match=r"serviceAccount\.name: name the account to use"):
        helm.render("tandem", {"serviceAccount": {"create": False}})


def test_cluster_scope_with_namespace_list_is_rejected(helm):
    with pytest.raises(HelmError, match="namespaces: scope Cluster includes all of them; leave the list empty"):
        helm.render("tandem", {"scope": "Cluster", "namespaces": ["models"]})


def test_old_clusters_get_a_disruption_budget_that_they_know(helm):
    for without, version in (((), "policy/v1"), (("policy/v1",), "policy/v1beta1")):
        (budget,) = of_kind(helm.render("tandem", without=without), "PodDisruptionBudget")
        assert budget["apiVersion"] == version


def test_one_replica_has_no_disruption_budget(rendered):
    """It would keep the node from being drained."""
    assert not of_kind(rendered["single"], "PodDisruptionBudget")


def test_network_policy_allows_metrics_ingress_and_needed_egress(rendered):
    (policy,) = of_kind(rendered["everything"], "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = policy["spec"]["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": 8080}]
    assert ingress["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    ports = [sorted({port["port"] for port in rule["ports"]}) for rule in policy["spec"]["egress"]]
    assert ports == [[6443], [53], [8000, 8001, 9090], [8080]]


@pytest.mark.parametrize("labels", [labels_of("chat", "worker"), shared_labels_of("front", "gateway")])
def test_operator_may_reach_workers_and_all_gateways(rendered, labels):
    (policy,) = of_kind(rendered["everything"], "NetworkPolicy")
    (rule,) = [one for one in policy["spec"]["egress"] if {"protocol": "TCP", "port": 8001} in one["ports"]]
    assert all(set(one) == {"namespaceSelector", "podSelector"} for one in rule["to"])
    required = [[need["key"] for need in one["podSelector"]["matchExpressions"]] for one in rule["to"]]
    assert any(set(keys) <= set(labels) for keys in required)


def test_model_services_let_the_operator_in(rendered):
    """Their policies know it by its namespace and by this label."""
    labels = deployment(rendered["defaults"])["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "operator"


def test_dashboard_arrives_whole(rendered):
    (dashboards,) = of_kind(rendered["everything"], "ConfigMap")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboards["metadata"]["namespace"] == "monitoring"
    committed = json.loads((CHARTS / "tandem" / "dashboards" / "tandem.json").read_text())
    assert {name: json.loads(text) for name, text in dashboards["data"].items()} == {"tandem.json": committed}


@pytest.mark.parametrize(
    ("case", "kind", "ports"),
    [("everything", "ServiceMonitor", "endpoints"), ("pod-monitor", "PodMonitor", "podMetricsEndpoints")],
)
def test_monitors_name_the_port_of_the_metrics(rendered, case, kind, ports):
    (monitor,) = of_kind(rendered[case], kind)
    assert [one["port"] for one in monitor["spec"][ports]] == ["http"]


@each_case
def test_operator_has_an_address(rendered, case):
    """The examples of examples/scaling name it."""
    (service,) = of_kind(rendered[case], "Service")
    (container,) = deployment(rendered[case])["spec"]["template"]["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    assert port["port"] == container["ports"][0]["containerPort"]
    assert port["targetPort"] == container["ports"][0]["name"]


def test_keda_example_uses_operator_metrics_address(rendered):
    manifests = [*rendered["cluster"], *yaml.safe_load_all((CHARTS / "install.yaml").read_text())]
    addresses = {
        f"http://{one['metadata']['name']}.{one['metadata']['namespace']}.svc:{one['spec']['ports'][0]['port']}/"
        for one in of_kind(manifests, "Service")
    }
    asked = re.findall(r"http://[^/]+/", (ROOT / "examples" / "scaling" / "keda.yaml").read_text())
    assert set(asked) == addresses


def test_names_follow_the_release(helm):
    for release, values, name in (
        ("tandem", {}, "tandem"),
        ("prod", {}, "prod-tandem"),
        ("prod", {"fullnameOverride": "llm"}, "llm"),
        ("a" * 53, {}, "a" * 50),
    ):
        manifests = helm.render("tandem", values, release=release)
        assert deployment(manifests)["metadata"]["name"] == f"{name}-operator"


def test_notes_name_watched_namespaces(helm):
    assert "It looks after ModelServices in: tandem-system." in helm.notes("tandem")
    assert "of every namespace" in helm.notes("tandem", {"scope": "Cluster"})


@pytest.mark.parametrize(("chart", "values"), [("tandem", {}), ("tandem-model", {"model": {"path": "/m"}})])
def test_helm_refuses_a_cluster_that_is_too_old(helm, chart, values):
    with pytest.raises(HelmError, match=r"chart requires kubeVersion: >=1\.29\.0-0"):
        helm.render(chart, values, kube="1.28.9")
    # As providers name theirs.
    assert helm.render(chart, values, kube="1.29.0-eks-1234567")


def test_allowed_options_become_an_operator_flag(helm):
    args = deployment(helm.render("tandem", {"allow": ["routes", "monitors"]}))["spec"]["template"]["spec"]
    assert "--allow=routes,monitors" in args["containers"][0]["args"]
    with pytest.raises(HelmError, match="/allow/0"):
        helm.render("tandem", {"allow": ["everything"]})


def test_pod_that_never_gets_ready_does_not_keep_its_node(helm):
    for without, policy in (((), "AlwaysAllow"), (("policy/v1",), None)):
        (budget,) = of_kind(helm.render("tandem", without=without), "PodDisruptionBudget")
        assert budget["spec"].get("unhealthyPodEvictionPolicy") == policy


@pytest.mark.parametrize("name", ["1chat", "chat.v1", "Chat", "chat-"])
def test_release_name_invalid_for_services_is_rejected(helm, name):
    with pytest.raises(HelmError, match="nameOverride|release name"):
        helm.render("tandem-model", {"model": {"path": "/m"}}, release=name)


def test_helm_itself_refuses_a_typo(helm):
    with pytest.raises(HelmError, match="additional properties 'replica' not allowed"):
        helm.render("tandem-model", {"model": {"path": "/m"}, "prefill": {"replica": 2}})
    with pytest.raises(HelmError, match="additional properties 'replica' not allowed"):
        helm.render("tandem", {"replica": 2})


def model_service(helm: HelmLibrary, values: dict[str, Any], **how: Any) -> dict[str, Any]:
    (manifest,) = helm.render("tandem-model", values, namespace="models", **how)
    return manifest


def test_model_without_source_error_lists_the_options(helm):
    with pytest.raises(
        HelmError, match=r"model: say where the checkpoint comes from, for example --set model\.hugging"
    ):
        helm.render("tandem-model")


def test_values_become_the_spec_as_they_are(rendered_models):
    """Every field of the examples, large whole numbers and amounts among them."""
    assert rendered_models
    for spec, manifest in rendered_models:
        assert manifest["spec"] == spec
        msgspec.convert(manifest["spec"], ModelServiceSpec)


def test_large_whole_numbers_stay_whole(helm):
    rendered = model_service(helm, {"model": {"path": "/m"}, "engine": {"contextLength": 1_048_576}})
    assert rendered["spec"]["engine"]["contextLength"] == 1_048_576
    assert isinstance(rendered["spec"]["engine"]["contextLength"], int)


def test_chart_adds_nothing_to_the_spec(helm):
    values = {"model": {"path": "/m"}, "labels": {"team": "a"}, "annotations": {"b": "c"}, "nameOverride": "chat"}
    rendered = model_service(helm, values | {"global": {"x": 1}})
    assert rendered["spec"] == {"model": {"path": "/m"}}
    assert rendered["metadata"]["name"] == "chat"
    assert rendered["metadata"]["labels"]["team"] == "a"
    assert rendered["metadata"]["annotations"] == {"b": "c"}


def test_release_name_too_long_for_pods_is_rejected(helm):
    with pytest.raises(HelmError, match="nameOverride: the ModelService would be called"):
        helm.render("tandem-model", {"model": {"path": "/m"}}, release="a" * 41)


def test_notes_of_a_model_show_an_example_request(helm):
    values = {
        "model": {"path": "/m"},
        "servedModelName": "qwen3",
        "gateway": {"authSecret": "k", "service": {"port": 81}},
    }
    notes = helm.notes("tandem-model", values, release="chat", namespace="models")
    assert "port-forward service/chat-gateway 8000:81" in notes
    assert '"model": "qwen3"' in notes
    assert "Secret k" in notes


def test_helm_without_crds_fails_naming_them(helm):
    with pytest.raises(HelmError, match=r'no matches for kind "ModelService".*\n.*ensure CRDs are installed first'):
        helm.render("tandem-model", {"model": {"path": "/m"}}, without=("tandem.dev/v1beta1",))
