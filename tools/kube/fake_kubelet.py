#!/usr/bin/env python3
"""Nodes without containers: pods bound to them become Running and Ready, and are gone as soon as they are deleted.

    pod ─▶ bound (by kube-scheduler, or with --bind by us in turn) ─▶ Running, Ready ─▶ deleted

Deployments get available and Services get endpoints (addresses of 10.244.0.0/16 without a listener). A test steers
a pod by annotations, in its template or later:

    fake-kubelet/ready: "false"      Running, but not Ready, until the annotation is taken away
    fake-kubelet/phase: Succeeded    or Failed: all containers end, with exit code 0 or 1
    fake-kubelet/hold: "true"        a deleted pod stays Terminating until the annotation is taken away
    fake-kubelet/loopback: "true"    an address of 127.244.0.0/16, where a test can answer for its containers

Bound pods also wait for their readiness gates: Ready is true when every condition that a gate names is.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kube_api import ApiError, Json, KubeApi

CAPACITY = {"cpu": "1000", "memory": "16Ti", "pods": "1000", "nvidia.com/gpu": "1000", "rdma/ib": "1000"}
"""Of each node: hundreds of services fit. What asks for more, or for a label that no node has, stays Pending."""
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_S = 40
PREFIX = "fake-kubelet/"
ENDED = ("Succeeded", "Failed")


class FakeKubelet:
    """All nodes of a cluster in one process."""

    def __init__(self, api: KubeApi, nodes: list[str], *, bind: bool) -> None:
        self.api, self.nodes, self.bind = api, nodes, bind
        self.next_node = itertools.cycle(nodes)
        self.next_address = itertools.count(2)
        self.started: dict[str, tuple[str, str]] = {}
        """uid of a pod → its address and when it started."""

    def register(self) -> None:
        """Make the Nodes, ready and without taints."""
        for name in self.nodes:
            labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
            _unless(409, self.api.create, "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            condition = {**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}
            status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [condition]}
            self.api.merge(f"/api/v1/nodes/{name}/status", {"status": status})
            self.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    def renew_leases(self) -> None:
        """Keep the nodes alive in the eyes of the node lifecycle controller; never returns."""
        while True:
            for name in self.nodes:
                spec = {"holderIdentity": name, "leaseDurationSeconds": LEASE_S, "renewTime": now(micro=True)}
                try:
                    if _unless(404, self.api.merge, f"{LEASES}/{name}", {"spec": spec}) is None:
                        self.api.create(LEASES, {"metadata": {"name": name}, "spec": spec})
                except (ApiError, OSError) as error:
                    print("lease:", error, flush=True)
            time.sleep(LEASE_S / 4)

    def run(self) -> None:
        """Follow all pods; never returns."""
        while True:
            try:
                for event in self.api.watch("/api/v1/pods"):
                    if event["type"] == "DELETED":
                        self.started.pop(event["object"]["metadata"]["uid"], None)
                    else:
                        self._handle(event["object"])
            except (ApiError, OSError) as error:
                print("watch:", error, flush=True)
                time.sleep(0.2)

    def _handle(self, pod: Json) -> None:
        """Bring one pod a step further."""
        metadata, node = pod["metadata"], pod["spec"].get("nodeName")
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        deleted = bool(metadata.get("deletionTimestamp"))
        if not node and self.bind and not deleted:
            target = {"apiVersion": "v1", "kind": "Node", "name": next(self.next_node)}
            binding = {"metadata": {"name": metadata["name"]}, "target": target}
            # 409: another scheduler has bound it. 404: it is gone again.
            _unless((404, 409), self.api.create, f"{path}/binding", binding)
        elif node not in self.nodes:
            return
        elif deleted and _annotation(pod, "hold") != "true":
            _unless((404, 409), self.api.delete, path, gracePeriodSeconds=0, preconditions={"uid": metadata["uid"]})
        elif pod["status"].get("phase") not in ENDED:
            self._report(path, pod)

    def _report(self, path: str, pod: Json) -> None:
        """Write the status that the pod should have by now, unless it has it."""
        uid = pod["metadata"]["uid"]
        if uid not in self.started:
            number = next(self.next_address)
            network = "127" if _annotation(pod, "loopback") == "true" else "10"
            self.started[uid] = (f"{network}.244.{number // 250 % 250}.{number % 250 + 1}", now())
        address, begin = self.started[uid]
        phase = _annotation(pod, "phase") or "Running"
        running = phase == "Running" and _annotation(pod, "ready") != "false"
        current = {one["type"]: one["status"] for one in pod["status"].get("conditions", [])}
        gates = [one["conditionType"] for one in pod["spec"].get("readinessGates", [])]
        wanted = {
            "PodScheduled": True,
            "Initialized": True,
            "ContainersReady": running,
            "Ready": running and all(current.get(gate) == "True" for gate in gates),
        }
        if pod["status"].get("phase") == phase and all(current.get(kind) == str(it) for kind, it in wanted.items()):
            return
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "127.0.0.1",
            "startTime": begin,
            "containerStatuses": [
                _container(one, uid, phase, begin, ready=running) for one in pod["spec"]["containers"]
            ],
            # A strategic merge: conditions that others wrote, such as those of readiness gates, stay.
            "conditions": [
                {"type": kind, "status": str(it), "lastTransitionTime": now()} for kind, it in wanted.items()
            ],
        }
        patch, content_type = {"status": status}, "application/strategic-merge-patch+json"
        _unless(404, self.api.request, "PATCH", f"{path}/status", patch, content_type=content_type)


def now(*, micro: bool = False) -> str:
    """The time as Kubernetes writes it: whole seconds, or microseconds for Leases."""
    form = "%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ"
    return datetime.datetime.now(datetime.UTC).strftime(form)


def _annotation(pod: Json, name: str) -> str | None:
    value: str | None = pod["metadata"].get("annotations", {}).get(PREFIX + name)
    return value


def _container(spec: Json, uid: str, phase: str, begin: str, *, ready: bool) -> Json:
    state: Json = {"running": {"startedAt": begin}}
    if phase in ENDED:
        failed = phase == "Failed"
        reason = "Error" if failed else "Completed"
        state = {"terminated": {"exitCode": int(failed), "reason": reason, "startedAt": begin, "finishedAt": now()}}
    return {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "fake",
        "containerID": f"fake://{uid}-{spec['name']}",
        "ready": ready,
        "started": phase == "Running",
        "restartCount": 0,
        "state": state,
    }


def _unless(expected: int | tuple[int, ...], call: Callable[..., Json], *arguments: Any, **options: Any) -> Json | None:
    """The result of an API call; None when it fails with an expected status."""
    try:
        return call(*arguments, **options)
    except ApiError as error:
        if error.status not in ((expected,) if isinstance(expected, int) else expected):
            raise
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1, help="how many: fake-0, fake-1, ... (default 1)")
    parser.add_argument("--bind", action="store_true", help="bind pods in turn, where no kube-scheduler runs")
    options = parser.parse_args()
    kubelet = FakeKubelet(KubeApi(options.kubeconfig), [f"fake-{i}" for i in range(options.nodes)], bind=options.bind)
    kubelet.register()
    threading.Thread(target=kubelet.renew_leases, daemon=True).start()
    kubelet.run()


if __name__ == "__main__":
    main()
