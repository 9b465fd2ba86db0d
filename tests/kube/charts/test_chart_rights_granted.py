"""What the operator's account may do once the chart is installed, by the API server itself: the list, and no more."""

import httpx
import pytest

from tandem_testing.account_access import account_client
from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.helm_library import CHARTS, NEEDS_HELM
from tandem_testing.waiting import wait_equal

pytestmark = [*KUBE, NEEDS_HELM]

OF_EVERYBODY = {
    "selfsubjectaccessreviews.authorization.k8s.io",
    "selfsubjectrulesreviews.authorization.k8s.io",
    "selfsubjectreviews.authentication.k8s.io",
}
"""What every account may do in any cluster: ask what it may do."""


def rights_in(client: httpx.Client, namespace: str) -> str:
    """All that the account may do in a namespace (`kubectl auth can-i --list`), as rights.txt writes it."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = client.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", json=review).raise_for_status().json()
    assert not answer["status"]["incomplete"]
    verbs: dict[str, set[str]] = {}
    for rule in answer["status"]["resourceRules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                names = f" {','.join(rule['resourceNames'])}" if rule.get("resourceNames") else ""
                verbs.setdefault(f"{resource}{'.' * bool(group)}{group}{names}", set()).update(rule["verbs"])
    ours = {resource: words for resource, words in verbs.items() if resource not in OF_EVERYBODY}
    return "".join(f"{resource}: {' '.join(sorted(words))}\n" for resource, words in sorted(ours.items()))


def may(client: httpx.Client, verb: str, resource: str, namespace: str, group: str = "", name: str = "") -> bool:
    """`kubectl auth can-i`."""
    resource, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "resource": resource, "subresource": subresource, "group": group, "name": name}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**attributes, "namespace": namespace}},
    }
    answer = client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", json=review).raise_for_status()
    allowed: bool = answer.json()["status"]["allowed"]
    return allowed


def listed(release: str) -> tuple[str, str]:
    """rights.txt: those in the namespaces of models, and those for the lease."""
    lines = (CHARTS.parent / "tests" / "charts" / "rights.txt").read_text().splitlines(keepends=True)
    lease = "".join(one for one in lines if one.startswith("leases"))
    return "".join(one for one in lines if not one.startswith("leases")), lease.replace(
        "tandem-operator", f"{release}-tandem-operator"
    )


def test_namespaced_rights_are_limited_to_listed_namespaces(control_plane, operator, namespace, second):
    operator.upgrade({"namespaces": [second]})
    models, lease = listed(namespace)
    with account_client(control_plane, namespace, f"{namespace}-tandem") as client:
        # Authorisers follow changes of roles with a moment's delay.
        wait_equal(lambda: rights_in(client, second), models, PATIENCE_S)
        assert rights_in(client, namespace) == lease
        assert rights_in(client, "default") == ""
        assert rights_in(client, "kube-system") == ""


def test_cluster_rights_are_the_documented_list_and_own_lease(control_plane, operator, namespace):
    operator.upgrade({"scope": "Cluster"})
    models, lease = listed(namespace)
    with account_client(control_plane, namespace, f"{namespace}-tandem") as client:
        wait_equal(lambda: rights_in(client, "default"), models, PATIENCE_S)
        assert sorted(rights_in(client, namespace).splitlines()) == sorted((models + lease).splitlines())


@pytest.mark.parametrize("scope", ["Namespaces", "Cluster"])
def test_operator_account_cannot_escalate_rights(control_plane, operator, namespace, scope):
    operator.upgrade({"scope": scope})
    with account_client(control_plane, namespace, f"{namespace}-tandem") as client:
        wait_equal(lambda: may(client, "create", "deployments", namespace, "apps"), True, PATIENCE_S)
        assert may(client, "get", "secrets", namespace, name="chat-redis")
        denied = [
            ("list", "secrets", ""),
            ("watch", "secrets", ""),
            ("update", "secrets", ""),
            ("delete", "secrets", ""),
            ("create", "pods", ""),
            ("create", "pods/exec", ""),
            ("get", "pods/log", ""),
            ("create", "serviceaccounts/token", ""),
            ("impersonate", "users", ""),
            ("create", "rolebindings", "rbac.authorization.k8s.io"),
            ("escalate", "roles", "rbac.authorization.k8s.io"),
            ("bind", "clusterroles", "rbac.authorization.k8s.io"),
            ("create", "daemonsets", "apps"),
            ("delete", "modelservices", "tandem.dev"),
            ("create", "modelservices", "tandem.dev"),
            ("update", "leases", "coordination.k8s.io"),
            ("*", "*", "*"),
        ]
        allowed = [words for words in denied if may(client, words[0], words[1], namespace, words[2])]
        assert allowed == []
        for resource in ("nodes", "namespaces", "persistentvolumes"):
            assert not may(client, "get", resource, "")
        assert may(client, "get", "leases", namespace, "coordination.k8s.io", f"{namespace}-tandem-operator")
        assert may(client, "list", "secrets", "kube-system") is False


def test_edit_role_may_write_models_and_view_role_read(control_plane, operator, namespace):
    """By aggregation into the cluster's own roles."""
    for role, verb, expected in (("edit", "create", True), ("view", "create", False), ("view", "list", True)):
        rules = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{role}"

        def allows(rules: str = rules, verb: str = verb) -> bool:
            given = control_plane.get(rules)["rules"]
            ours = [one for one in given if "tandem.dev" in one["apiGroups"] and "modelservices" in one["resources"]]
            return any(verb in one["verbs"] for one in ours)

        wait_equal(allows, expected, PATIENCE_S, lambda role=role, verb=verb: f"{role} with {verb}")
