"""Edge values of what a ModelService says of its pods: accepted here if and only if an API server accepts the pod.

Unit tests read the verdicts here, tests against a control plane ask it for both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem_operator.api.pods import Resources
from tandem_operator.builders.containers import resources_of

Manifest = dict[str, Any]
LONG = "a" * 63
KEYS = ("a", "A.b_c-d", "x/a", "example.com/team", f"a.b/{LONG}", f"{'a' * 180}/{LONG}")
NO_KEYS = ("", "-a", "a-", "a b", "/a", "a/", "a/b/c", "A/b", "a..b/c", ".a/b", "-a/b", "a-/b", f"x/{LONG}a", "ä")
LINES = "a\n"
"""Of keys of maps, which no schema constrains: Python's $ would let it pass."""
LONG_KEY = f"{'a' * 250}/abc"
DOMAINS = ("a", "a.b", "0-a.b-c", "a" * 253)
NO_DOMAINS = ("A", "-a", "a-", "a..b", "a.-b", "a.", ".a", "a_b", "a" * 254)
WORDS = ("a", "A", "0", "a.b_c-d", LONG)
NO_WORDS = ("-a", "a-", "a.", "a b", "a/b", f"{LONG}a", "ä")


@dataclass(frozen=True, kw_only=True)
class PodValue:
    """Values for one place."""

    name: str
    spec: Callable[[Any], Manifest]
    """What a ModelService with it has besides its model."""
    manifest: Callable[[Any], Manifest] | None = None
    """An object of Kubernetes with it. None: of an API that the control plane of tests lacks."""
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    stricter: tuple[Any, ...] = ()
    """Refused although an API server accepts it, or one of that age does."""
    by_rule: bool = False
    """Refused by rules of the schema alone, which need an API server."""


def deployment(*, metadata: Manifest | None = None, container: Manifest | None = None, **pod: Any) -> Manifest:
    """With a pod as in a template: admission does not look for what it names."""
    labels = {"app": "edge", **(metadata or {}).get("labels", {})}
    containers = [{"name": "main", "image": "i", **(container or {})}]
    template = {"metadata": {**(metadata or {}), "labels": labels}, "spec": {"containers": containers, **pod}}
    spec = {"selector": {"matchLabels": {"app": "edge"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "edge"}, "spec": spec}


def pod(**fields: Any) -> Manifest:
    return {"prefill": {"pod": fields}}


def near(key: str) -> Manifest:
    term = {"topologyKey": key, "labelSelector": {}}
    return deployment(affinity={"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})


def with_resources(**amounts: Any) -> Manifest:
    return deployment(container={"resources": resources_of(Resources(**amounts))})


def rdma(name: str) -> Manifest:
    return with_resources(requests={name: "1"}, limits={name: "1"})


def from_secret(name: str, key: str) -> Manifest:
    return deployment(
        container={"env": [{"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": key}}}]},
    )


def reachable(cidr: str) -> Manifest:
    spec = {"podSelector": {}, "egress": [{"to": [{"ipBlock": {"cidr": cidr}}]}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "edge"}, "spec": spec}


def of_both(**amounts: Any) -> Manifest:
    return {"requests": amounts, "limits": amounts}


POD_VALUES = (
    PodValue(
        name="keys of labels",
        spec=lambda key: pod(labels={key: "v"}),
        manifest=lambda key: deployment(metadata={"labels": {key: "v"}}),
        good=KEYS,
        bad=(*NO_KEYS, LINES),
        stricter=(LONG_KEY,),
    ),
    PodValue(
        name="values of labels",
        spec=lambda text: pod(labels={"k": text}),
        manifest=lambda text: deployment(metadata={"labels": {"k": text}}),
        good=("", *WORDS),
        bad=NO_WORDS,
    ),
    PodValue(
        name="keys of annotations",
        spec=lambda key: pod(annotations={key: "v"}),
        manifest=lambda key: deployment(metadata={"annotations": {key: "v"}}),
        good=KEYS,
        bad=(*(key for key in NO_KEYS if key != "A/b"), LINES),
        stricter=("A/b", LONG_KEY),
    ),
    PodValue(
        name="keys of node selectors",
        spec=lambda key: pod(nodeSelector={key: "v"}),
        manifest=lambda key: deployment(nodeSelector={key: "v"}),
        good=KEYS,
        bad=(*NO_KEYS, LINES),
    ),
    PodValue(
        name="values of node selectors",
        spec=lambda text: pod(nodeSelector={"k": text}),
        manifest=lambda text: deployment(nodeSelector={"k": text}),
        good=("", *WORDS),
        bad=NO_WORDS,
    ),
    PodValue(
        name="keys of tolerations",
        spec=lambda key: pod(tolerations=[{"key": key, "value": "v"}]),
        manifest=lambda key: deployment(tolerations=[{"key": key, "value": "v"}]),
        good=KEYS,
        bad=NO_KEYS[1:],
    ),
    PodValue(
        name="values of tolerations",
        spec=lambda text: pod(tolerations=[{"key": "k", "value": text}]),
        manifest=lambda text: deployment(tolerations=[{"key": "k", "value": text}]),
        good=("", *WORDS),
        bad=NO_WORDS,
    ),
    PodValue(
        name="tolerations",
        spec=lambda one: pod(tolerations=[one]),
        manifest=lambda one: deployment(tolerations=[one]),
        good=(
            {"operator": "Exists"},
            {"key": "k"},
            {"key": "k", "operator": "Exists", "value": ""},
            {"key": "k", "effect": "NoExecute", "tolerationSeconds": -1},
        ),
        bad=(
            {},
            {"value": "v"},
            {"operator": "Equal"},
            {"key": "k", "operator": "Exists", "value": "v"},
            {"key": "k", "tolerationSeconds": 1},
            {"key": "k", "effect": "NoSchedule", "tolerationSeconds": 1},
        ),
        by_rule=True,
    ),
    PodValue(
        name="topology keys",
        spec=lambda key: {"transfer": {"topology": {"key": key, "required": True}}},
        manifest=near,
        good=KEYS,
        bad=NO_KEYS,
    ),
    PodValue(
        name="names of RDMA resources",
        spec=lambda name: {"transfer": {"rdma": {"resource": name}}},
        manifest=rdma,
        good=("rdma/ib", "rdma/hca_shared_devices_a", "nvidia.com/mig-3g.40gb"),
        bad=("", "hca", "A/b", "a..b/c", "a/b/c", "a/", "/b", "a/-b", f"{'a' * 245}/b"),
        stricter=("cpu", "hugepages-2Mi"),
    ),
    PodValue(
        name="RDMA resources that are none of a device plugin",
        spec=lambda name: {"transfer": {"rdma": {"resource": name}}},
        manifest=rdma,
        good=("my.requests/hca", "kubernetes.io.example/hca"),
        bad=("requests.rdma/hca", "requests.a/b"),
        stricter=("kubernetes.io/hca", "rdma.kubernetes.io/hca"),
        by_rule=True,
    ),
    PodValue(
        name="resources",
        spec=lambda amounts: {"prefill": {"resources": amounts}},
        manifest=lambda amounts: with_resources(**amounts),
        good=(
            {"limits": {"example.com/gpu": 1}},
            {"limits": {"example.com/gpu": "1000m"}},
            of_both(**{"rdma/ib": "2", "hugepages-2Mi": "4Mi", "hugepages-1Gi": "1Gi"}),
            {"requests": {"cpu": "0.5", "memory": "1Gi", "ephemeral-storage": "1Gi"}, "limits": {"cpu": "1500m"}},
            {"requests": {"cpu": 0}, "limits": {"cpu": 0, "example.com/none": 0}},
            {"requests": {"rdma/ib": "1"}, "limits": {"rdma/ib": 1}},
        ),
        bad=(
            {"limits": {"gpu": 1}},
            {"requests": {"hca": 1}, "limits": {"hca": 1}},
            {"limits": {"pods": 1}},
            {"limits": {"storage": "1Gi"}},
            {"limits": {"requests.cpu": 1}},
            {"limits": {"requests.example.com/gpu": 1}},
            {"limits": {"example.com/": 1}},
            {"limits": {"EXAMPLE.com/gpu": 1}},
            {"limits": {"example.com/gpu": "0.5"}},
            {"limits": {"example.com/gpu": "500m"}},
            {"requests": {"example.com/gpu": 1}},
            {"requests": {"example.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2}},
            {"requests": {"hugepages-2Mi": "2Mi"}},
            {"requests": {"hugepages-2Mi": "2Mi"}, "limits": {"hugepages-2Mi": "4Mi"}},
            {"requests": {"cpu": 2}, "limits": {"cpu": 1}},
            {"limits": {"cpu": -1}},
            {"limits": {"memory": "-1Gi"}},
            {"limits": {"memory": "1GB"}},
        ),
        stricter=(
            {"limits": {"hugepages-2Mi": "3Mi"}},
            {"limits": {"hugepages-large": "2Mi"}},
            {"limits": {"kubernetes.io/gpu": 1}},
            {"limits": {"memory": "1Ei"}},
        ),
    ),
    PodValue(
        name="amounts",
        spec=lambda amount: pod(scratchLimit=amount),
        manifest=lambda amount: deployment(volumes=[{"name": "v", "emptyDir": {"sizeLimit": amount}}]),
        good=(0, 1, "0", "1.5Gi", "100m", "16Gi"),
        bad=(-1, "-1", "", "1 Gi", "1gi", "1GB", "1..5"),
        stricter=("1e3", "+1", "Gi", ".", ".5", "1E"),
    ),
    PodValue(
        name="names of variables",
        spec=lambda name: pod(env=[{"name": name, "secretKeyRef": {"name": "s", "key": "k"}}]),
        manifest=lambda name: from_secret(name, "k"),
        good=("A", "_a1", "a"),
        bad=("", "1a", "a b", "a=b", "ä"),
        stricter=("a.b", "a-b"),
    ),
    PodValue(
        name="keys of Secrets",
        spec=lambda key: pod(env=[{"name": "A", "secretKeyRef": {"name": "s", "key": key}}]),
        manifest=lambda key: from_secret("A", key),
        good=("k", ".k", "a.b_c-D", "a" * 253),
        bad=("", ".", "..", "..k", "a/b", "a b", "a" * 254),
    ),
    PodValue(
        name="service accounts",
        spec=lambda name: pod(serviceAccountName=name),
        manifest=lambda name: deployment(serviceAccountName=name),
        good=DOMAINS,
        bad=NO_DOMAINS,
    ),
    PodValue(
        name="priority classes",
        spec=lambda name: pod(priorityClassName=name),
        manifest=lambda name: deployment(priorityClassName=name),
        good=("", *DOMAINS),
        bad=NO_DOMAINS,
    ),
    PodValue(
        name="runtime classes",
        spec=lambda name: pod(runtimeClassName=name),
        manifest=lambda name: deployment(runtimeClassName=name),
        good=DOMAINS,
        bad=NO_DOMAINS,
    ),
    PodValue(
        name="blocks of addresses",
        spec=lambda cidr: {"security": {"egress": [{"cidr": cidr}]}},
        manifest=reachable,
        good=("10.0.0.0/8", "0.0.0.0/0", "2001:db8::/32"),
        bad=("", "10.0.0.0", "10.0.0.0/33", "10.0.0/8", "1.2.3.4.5/8", "2001:db8::/129", "::::/8"),
    ),
    PodValue(
        name="hosts of HTTPRoutes",
        spec=lambda name: {"gateway": {"httpRoute": {"parentRefs": [{"name": "g"}], "hostnames": [name]}}},
        good=("a", "a.b", "*.a.b"),
        bad=("", "*", "a..b", "a.-b", "*.", "a.*", "*a.b", "-a"),
    ),
)
