"""What administrators do to a cluster that serves: nodes are drained, everything is restarted [rolling-loses-nothing].

Under load, with containers: tests/e2e. Here: that never fewer pods are ready than it takes, whatever is exchanged.
"""

import os
import subprocess

from tandem_testing.control_plane import HOME, KUBE, PATIENCE_S
from tandem_testing.kube_availability import is_ready, watched
from tandem_testing.waiting import wait_equal, wait_for

pytestmark = KUBE

TWO = {"replicas": 2}
NOT_READY = "fake-kubelet/ready"
DRAIN = ("drain", "--ignore-daemonsets", "--delete-emptydir-data")
DRAINED_IN = "drained-in"
"""Label of the pods to drain, whose value is their namespace: what other tests have left on a node stays there."""


def decode_pods(services):
    return [one for one in services.pods("worker") if one["metadata"]["labels"]["tandem.dev/role"] == "decode"]


def make_ready(services) -> None:
    """All decode pods that are there: their template says that they are not."""
    for pod in decode_pods(services):
        if NOT_READY in pod["metadata"]["annotations"]:
            path = f"/api/v1/namespaces/{services.namespace}/pods/{pod['metadata']['name']}"
            services.cluster.api.patch(
                path,
                json={"metadata": {"annotations": {NOT_READY: None}}},
                headers={"Content-Type": "application/merge-patch+json"},
            )


def test_node_drain_waits_until_the_replacement_is_ready(services, running, tmp_path):
    """By kubectl itself [rolling-loses-nothing]."""
    mine = {DRAINED_IN: services.namespace}
    services.apply(decode={**TWO, "pod": {"annotations": {NOT_READY: "false"}, "labels": mine}})
    wait_equal(lambda: len(decode_pods(services)), 2, PATIENCE_S, running.log)
    make_ready(services)
    services.wait_ready()
    cluster = services.cluster
    first, second = decode_pods(services)
    nodes = [first["spec"]["nodeName"], second["spec"]["nodeName"]]
    budget = f"/apis/{cluster.newest('policy/v1', 'policy/v1beta1')}/namespaces/{services.namespace}"
    (revision,) = services.workers("decode")
    budget += f"/poddisruptionbudgets/chat-decode-{revision}"
    try:
        cluster.kubectl("cordon", nodes[0])
        # As a drain does it with the first pod.
        body = {"kind": "Eviction", "metadata": {"name": first["metadata"]["name"], "namespace": services.namespace}}
        version = cluster.newest("policy/v1", "policy/v1beta1")
        path = f"/api/v1/namespaces/{services.namespace}/pods/{first['metadata']['name']}"
        wait_equal(lambda: cluster.get(budget)["status"]["disruptionsAllowed"], 1, PATIENCE_S)
        cluster.api.post(f"{path}/eviction", json={"apiVersion": version, **body}).raise_for_status()
        wait_equal(lambda: cluster.get(budget)["status"]["disruptionsAllowed"], 0, PATIENCE_S)
        errors = tmp_path / "drain.log"
        chosen = f"--pod-selector={DRAINED_IN}={services.namespace}"
        command = [str(HOME / "bin/kubectl"), "--kubeconfig", str(cluster.kubeconfig), *DRAIN, chosen, nodes[1]]
        environment = {**os.environ, "HOME": str(tmp_path)}
        with (
            errors.open("w") as log,
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as drain,
        ):
            refused = "Cannot evict pod as it would violate the pod's disruption budget"
            wait_for(lambda: refused in errors.read_text(), PATIENCE_S, errors.read_text)
            there = {one["metadata"]["uid"] for one in decode_pods(services) if is_ready(one)}
            assert there == {second["metadata"]["uid"]}, "the one that is left serves"

            def drained() -> bool:
                make_ready(services)
                return drain.poll() is not None

            wait_for(drained, PATIENCE_S, errors.read_text)
            assert drain.returncode == 0, errors.read_text()
    finally:
        for node in set(nodes):
            cluster.kubectl("uncordon", node)

    def back() -> bool:
        make_ready(services)
        return len([one for one in decode_pods(services) if is_ready(one)]) == 2

    wait_for(back, PATIENCE_S, lambda: services.described() + running.log())
    assert second["metadata"]["uid"] not in {one["metadata"]["uid"] for one in decode_pods(services)}
    services.wait_ready()


def test_stuck_rollout_does_not_block_a_drain(services, running):
    """One budget of a role over all revisions counted the new pod that was never ready, and allowed nothing more."""
    services.apply(prefill=TWO, decode=TWO)
    services.wait_ready()
    (old,) = services.workers("decode")
    broken = {**TWO, "pod": {"annotations": {NOT_READY: "false"}}}
    services.apply(prefill=broken, decode=broken, model={"path": "/opt/tandem/models/tandem-mini-eagle"})
    wait_equal(lambda: len(decode_pods(services)), 3, PATIENCE_S, running.log)
    wait_for(
        lambda: services.get()["status"]["revision"] != old, PATIENCE_S, lambda: services.described() + running.log()
    )
    status = services.get()["status"]
    assert (status["ready"], status["serving"]) == ("2/2P 2/2D", old)
    version = services.cluster.newest("policy/v1", "policy/v1beta1")
    budgets = f"/apis/{version}/namespaces/{services.namespace}/poddisruptionbudgets"

    def allowed(role: str) -> int:
        return services.cluster.get(f"{budgets}/chat-{role}-{old}").get("status", {}).get("disruptionsAllowed", 0)

    for role in ("prefill", "decode"):
        wait_equal(lambda role=role: allowed(role), 1, PATIENCE_S, running.log)
        serving = [
            one["metadata"]["name"]
            for one in services.pods("worker")
            if one["metadata"]["labels"]["tandem.dev/role"] == role
            and one["metadata"]["labels"]["tandem.dev/revision"] == old
        ]
        body = {"kind": "Eviction", "metadata": {"name": serving[0], "namespace": services.namespace}}
        path = f"/api/v1/namespaces/{services.namespace}/pods/{serving[0]}"
        answer = services.cluster.api.post(f"{path}/eviction", json={"apiVersion": version, **body})
        assert answer.status_code == 201, answer.text
    # Budgets go with the workers that they protect.
    services.apply(prefill=TWO, decode=TWO, model={"path": "/opt/tandem/models/tandem-mini-eagle"})
    services.wait_ready()
    names = {f"chat-{role}-{services.get()['status']['revision']}" for role in ("prefill", "decode")}
    wait_equal(
        lambda: {one["metadata"]["name"] for one in services.cluster.get(budgets)["items"]},
        names,
        PATIENCE_S,
        running.log,
    )


def test_rolling_restart_keeps_minimum_pods_of_every_component(services, running):
    """By `kubectl rollout restart`: it stays, for the operator takes back what is its own alone."""
    services.apply(prefill=TWO, decode=TWO, gateway=TWO)
    services.wait_ready()
    before = {one["metadata"]["uid"] for part in ("worker", "gateway", "redis") for one in services.pods(part)}
    names = sorted(services.deployments(), key=lambda name: (name.endswith("redis"), name))
    with watched(services) as fewest:
        for name in names:
            services.cluster.kubectl("-n", services.namespace, "rollout", "restart", f"deployment/{name}")
            services.cluster.kubectl("-n", services.namespace, "rollout", "status", f"deployment/{name}")
        services.wait_ready()
    assert fewest == {"prefill": 2, "decode": 2, "gateway": 2}

    def exchanged() -> bool:
        there = {one["metadata"]["uid"] for part in ("worker", "gateway", "redis") for one in services.pods(part)}
        return len(there) == len(before) and not there & before

    wait_for(exchanged, PATIENCE_S, lambda: services.described() + running.log())
