"""What the operator may do, as the chart says it: a list that a change of rights shows up in, and what it never has.

That it is neither too little nor too much for what the operator does is tested with a real API server
(tests/kube/charts).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tandem_testing.helm_library import CHARTS, NEEDS_HELM

GOLDEN = CHARTS.parent / "tests" / "charts" / "rights.txt"
Right = tuple[str, str]
"""Resource with its group, and verb."""


def rights_of(role: dict[str, Any]) -> Iterator[Right]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                names = f" {','.join(rule['resourceNames'])}" if "resourceNames" in rule else ""
                for verb in rule["verbs"]:
                    yield f"{resource}{'.' * bool(group)}{group}{names}", verb


def table(role: dict[str, Any]) -> str:
    verbs: dict[str, list[str]] = {}
    for resource, verb in rights_of(role):
        verbs.setdefault(resource, []).append(verb)
    return "".join(f"{resource}: {' '.join(sorted(words))}\n" for resource, words in sorted(verbs.items()))


def installed(kind: str, name: str) -> dict[str, Any]:
    """A role of charts/install.yaml, which is what the chart renders for the whole cluster."""
    (found,) = [
        one
        for one in yaml.safe_load_all((CHARTS / "install.yaml").read_text())
        if one["kind"] == kind and one["metadata"]["name"] == name
    ]
    return found


OPERATOR = installed("ClusterRole", "tandem-operator")
LEADER = installed("Role", "tandem-leader")


def test_operators_rights_are_those_of_the_list():
    assert f"{table(OPERATOR)}{table(LEADER)}" == GOLDEN.read_text()


def test_chart_grants_no_right_twice():
    rights = list(rights_of(OPERATOR))
    assert len(set(rights)) == len(rights)


def test_there_are_no_wildcards_and_no_rights_to_get_more_rights():
    for role in (OPERATOR, LEADER):
        for rule in role["rules"]:
            assert "nonResourceURLs" not in rule
            words = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not words & {"*", "bind", "escalate", "impersonate", "proxy", "approve"}
            assert "rbac.authorization.k8s.io" not in rule["apiGroups"]


@pytest.mark.parametrize(
    "resource", ["pods/exec", "pods/attach", "pods/portforward", "pods/ephemeralcontainers", "nodes", "serviceaccounts"]
)
def test_operator_has_no_right_to_escalating_resources(resource):
    assert resource not in {one.split(".")[0] for one, _ in rights_of(OPERATOR)}


def test_secrets_are_read_by_name_alone():
    assert {verb for resource, verb in rights_of(OPERATOR) if resource == "secrets"} == {"get", "create", "patch"}


@NEEDS_HELM
@pytest.mark.xdist_group("helm")
def test_rights_are_the_same_in_a_namespace_and_in_the_cluster(helm):
    rendered = helm.render("tandem", {"namespaces": ["models"]})
    (role,) = [one for one in rendered if one["metadata"]["name"] == "tandem-operator" and one["kind"] == "Role"]
    assert role["rules"] == OPERATOR["rules"]
    (leader,) = [one for one in rendered if one["metadata"]["name"] == "tandem-leader" and one["kind"] == "Role"]
    assert leader["rules"] == LEADER["rules"]
    assert leader["metadata"]["namespace"] == "tandem-system"
