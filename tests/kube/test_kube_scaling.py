"""Pools as `kubectl scale` and autoscalers see them."""

import pytest

from tandem_testing.control_plane import KUBE, PATIENCE_S
from tandem_testing.custom_resources import worker_pool
from tandem_testing.waiting import wait_equal

pytestmark = KUBE


def test_scale_subresource_reads_and_writes_replicas(control_plane, namespace):
    manifest = worker_pool(namespace)
    control_plane.apply(manifest).raise_for_status()
    path = control_plane.path(manifest)
    status = {"replicas": 3, "readyReplicas": 2, "selector": "tandem.dev/role=decode"}
    control_plane.merge(f"{path}/status", {"status": status}).raise_for_status()
    scale = control_plane.get(f"{path}/scale")
    assert scale["spec"]["replicas"] == 1
    assert scale["status"] == {"replicas": 3, "selector": "tandem.dev/role=decode"}
    control_plane.merge(f"{path}/scale", {"spec": {"replicas": 5}}).raise_for_status()
    assert control_plane.get(path)["spec"]["replicas"] == 5


def test_applying_pool_without_replicas_keeps_scaled_number(control_plane, namespace):
    """The operator applies pools without that field: it is an autoscaler's."""
    manifest = worker_pool(namespace)
    control_plane.apply(manifest).raise_for_status()
    control_plane.merge(control_plane.path(manifest, "scale"), {"spec": {"replicas": 5}}).raise_for_status()
    assert control_plane.apply(manifest).raise_for_status().json()["spec"]["replicas"] == 5


def test_kubectl_scale_sets_pool_replicas_within_bounds(control_plane, namespace):
    manifest = worker_pool(namespace)
    control_plane.apply(manifest).raise_for_status()
    control_plane.kubectl("-n", namespace, "scale", "workerpool/chat-decode", "--replicas=4")
    assert control_plane.get(control_plane.path(manifest))["spec"]["replicas"] == 4
    with pytest.raises(AssertionError, match="spec.replicas"):
        control_plane.kubectl("-n", namespace, "scale", "wp/chat-decode", "--replicas=1001")


def test_hpa_finds_the_workers_of_a_pool(control_plane, namespace):
    """Whether it can compute anything depends on metrics; that it reads and may write the scale does not."""
    manifest = worker_pool(namespace)
    control_plane.apply(manifest).raise_for_status()
    status = {"replicas": 1, "selector": "tandem.dev/role=decode"}
    control_plane.merge(control_plane.path(manifest, "status"), {"status": status}).raise_for_status()
    target = {"apiVersion": "tandem.dev/v1beta1", "kind": "WorkerPool", "name": "chat-decode"}
    hpa = {
        "apiVersion": "autoscaling/v1",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "decode", "namespace": namespace},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 4},
    }
    control_plane.apply(hpa).raise_for_status()
    path = control_plane.path(manifest)
    wait_equal(lambda: control_plane.get(path)["spec"]["replicas"], 2, PATIENCE_S)
