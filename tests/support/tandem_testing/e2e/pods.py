"""Pods, Deployments and Services of one namespace of a real cluster, as an administrator sees them."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tandem_operator.builders.worker import HEALTH_PORT
from tandem_testing.control_plane import ControlPlane, Manifest
from tandem_testing.waiting import wait_for

START_S = 180.0
"""Pods of a loaded machine with two cores have so long to turn ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pods:
    """Looked up when asked for."""

    cluster: ControlPlane
    namespace: str

    @property
    def core(self) -> str:
        """Path of the core group's objects."""
        return f"/api/v1/namespaces/{self.namespace}"

    def named(self, selector: dict[str, str]) -> list[Manifest]:
        """Pods with these labels."""
        words = ",".join(f"{name}={value}" for name, value in selector.items())
        answer = self.cluster.api.get(f"{self.core}/pods", params={"labelSelector": words}).raise_for_status()
        found: list[Manifest] = answer.json()["items"]
        return found

    def ready(self, selector: dict[str, str]) -> list[str]:
        """Names of those that are ready and stay."""
        return [one["metadata"]["name"] for one in self.named(selector) if is_ready(one)]

    def wait_ready(self, selector: dict[str, str], count: int, timeout_s: float = START_S) -> None:
        """Until exactly so many are ready and no other is there."""

        def settled() -> bool:
            there = self.named(selector)
            return len(there) == count and all(is_ready(one) for one in there)

        wait_for(settled, timeout_s, lambda: f"{count} pods of {selector}\n{self.explain()}")

    def evict(self, name: str) -> None:
        """As `kubectl drain` does: refused for as long as a disruption budget forbids it."""
        version = "policy/v1" if self.cluster.serves("policy/v1") else "policy/v1beta1"
        body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}

        def evicted() -> bool:
            answer = self.cluster.api.post(f"{self.core}/pods/{name}/eviction", json=body)
            if answer.status_code != 429:
                answer.raise_for_status()
            return answer.status_code != 429

        wait_for(evicted, START_S, lambda: f"{name} may not be evicted\n{self.explain()}")

    def replace_each(self, selector: dict[str, str], count: int) -> None:
        """Evict those that are ready one after the other, each once the successor of the one before is ready."""
        for name in self.ready(selector):
            self.evict(name)
            self.wait_gone(name)
            self.wait_ready(selector, count)

    def wait_gone(self, name: str, timeout_s: float = START_S) -> None:
        """Until the pod is no more."""
        path = f"{self.core}/pods/{name}"
        wait_for(lambda: self.cluster.api.get(path).status_code == 404, timeout_s, lambda: f"{name} is still there")

    @contextmanager
    def cordoned(self) -> Iterator[None]:
        """No pod is given a node during the block, as by `kubectl cordon` of each of them."""
        paths = [f"/api/v1/nodes/{one['metadata']['name']}" for one in self.cluster.get("/api/v1/nodes")["items"]]
        try:
            for path in paths:
                self.cluster.merge(path, {"spec": {"unschedulable": True}}).raise_for_status()
            yield
        finally:
            for path in paths:
                self.cluster.merge(path, {"spec": {"unschedulable": None}}).raise_for_status()

    def service_url(self, name: str) -> str:
        """Of a Service, by its ClusterIP: DNS names are known to pods alone."""
        spec = self.cluster.get(f"{self.core}/services/{name}")["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def scale(self, deployment: str, replicas: int) -> None:
        """By the scale subresource, like `kubectl scale`."""
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{deployment}/scale"
        self.cluster.merge(path, {"spec": {"replicas": replicas}}).raise_for_status()

    def handovers(self, selector: dict[str, str]) -> dict[str, int]:
        """Prompts whose KV went from these workers to others, and transfers of theirs that failed."""
        names = {"tandem_worker_kv_handovers_total": "handovers", "tandem_worker_kv_transfer_failures_total": "failed"}
        sums = dict.fromkeys(names.values(), 0)
        for pod in self.named(selector):
            text = httpx.get(f"http://{pod['status']['podIP']}:{HEALTH_PORT}/metrics", timeout=10.0).text
            for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE):
                if name in names:
                    sums[names[name]] += int(float(value))
        return sums

    def log(self, pod: str, lines: int = 30) -> str:
        """The end of its log."""
        return self.cluster.api.get(f"{self.core}/pods/{pod}/log", params={"tailLines": str(lines)}).text

    def explain(self) -> str:
        """Every pod with its state, warnings, and the end of the logs of those that are not ready."""
        there = self.named({})
        lines = [f"{one['metadata']['name']}: {_state(one)}" for one in there]
        events = self.cluster.get(f"{self.core}/events")["items"]
        lines += [f"{one['involvedObject']['name']}: {one['message']}" for one in events if one["type"] == "Warning"][
            -20:
        ]
        for one in there:
            if not is_ready(one):
                lines += [f"--- {one['metadata']['name']}", self.log(one["metadata"]["name"])]
        return "\n".join(lines)


def is_ready(pod: Manifest) -> bool:
    """Whether it is ready and not about to go."""
    if "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def restarts(pod: Manifest) -> int:
    """Of all its containers."""
    return sum(one["restartCount"] for one in pod["status"].get("containerStatuses", []))


def curl(url: str, body: str) -> tuple[int, str]:
    """Status and body of a POST, by the command that people use."""
    words = ["curl", "--silent", "--show-error", "--max-time", "60", "--write-out", "\n%{http_code}"]
    words += ["--header", "Content-Type: application/json", "--data", body, url]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), answer


def _state(pod: Manifest) -> str:
    going = "going, " if "deletionTimestamp" in pod["metadata"] else ""
    waiting: list[Any] = [one.get("state", {}) for one in pod["status"].get("containerStatuses", [])]
    return f"{going}{pod['status'].get('phase')} {'ready' if is_ready(pod) else 'not ready'} {waiting}"
