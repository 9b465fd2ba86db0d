"""`rollout.paused`: what is held while it is set, and what continues."""

from dataclasses import replace

import pytest

from tandem_operator.planning.observed import Ref
from tandem_testing.kube_cluster import KubeCluster, service_of

PAUSED = {"rollout": {"paused": True}}
CHANGED = {"observability": {"logLevel": "debug"}}


def paused(cluster: KubeCluster) -> dict[str, bool]:
    return {name.removesuffix(f"-{cluster.status.revision}"): one.paused for name, one in cluster.deployments.items()}


@pytest.fixture
def cluster() -> KubeCluster:
    cluster = KubeCluster()
    cluster.settle(service_of())
    return cluster


def test_every_deployment_is_paused_as_kubectl_would_do_it(cluster):
    assert set(paused(cluster).values()) == {False}
    cluster.settle(service_of(**PAUSED, **CHANGED))
    assert paused(cluster) == dict.fromkeys(("chat-prefill", "chat-decode", "chat-gateway", "chat-redis"), True)
    (progress,) = [one for one in cluster.status.conditions if one.type == "Progressing"]
    assert (progress.status, progress.reason) == ("False", "Paused")
    cluster.settle(service_of(**CHANGED))
    assert set(paused(cluster).values()) == {False}


def test_paused_rollout_still_scales(cluster):
    cluster.settle(service_of(**PAUSED, decode={"replicas": 3}))
    assert cluster.deployments[f"chat-decode-{cluster.status.revision}"].replicas == 3


def test_service_that_is_paused_from_the_beginning_comes_up():
    """A paused Deployment without pods makes none: it is paused once it has some."""
    cluster = KubeCluster()
    cluster.reconcile(service_of(**PAUSED))
    assert set(paused(cluster).values()) == {False}
    cluster.deployments = {name: replace(one, pods=0) for name, one in cluster.deployments.items()}
    cluster.reconcile(service_of(**PAUSED))
    assert set(paused(cluster).values()) == {False}
    cluster.settle(service_of(**PAUSED))
    assert set(paused(cluster).values()) == {True}
    assert {one.type: one.status for one in cluster.status.conditions}["Ready"] == "True"


def test_pause_outlasts_the_loss_of_all_pods(cluster):
    """The last pod of a role was evicted: its successor must not bring the change that is held."""
    cluster.settle(service_of(**PAUSED))
    cluster.deployments = {name: replace(one, pods=0, ready=0) for name, one in cluster.deployments.items()}
    cluster.reconcile(service_of(**PAUSED, **CHANGED))
    assert set(paused(cluster).values()) == {True}


def test_another_revision_waits_and_is_rolled_out_afterwards(cluster):
    old = cluster.status.revision
    other = {"model": {"path": "/models/other"}}
    cluster.settle(service_of({**other, **PAUSED, "decode": {"replicas": 2}}))
    new = cluster.status.revision
    assert new != old
    assert {one.name: one.replicas for one in cluster.deployments.values() if one.role} == {
        f"chat-prefill-{old}": 1,
        f"chat-decode-{old}": 2,
        f"chat-prefill-{new}": 0,
        f"chat-decode-{new}": 0,
    }
    assert f"revisions stay as they are ({old}; wanted is {new})" in str(cluster.status.conditions)
    cluster.settle(service_of({**other, "decode": {"replicas": 2}}))
    assert Ref(api_version="apps/v1", kind="Deployment", name=f"chat-decode-{old}") not in cluster.objects
    assert cluster.deployments[f"chat-decode-{new}"].replicas == 2
