#!/usr/bin/env python3
"""A real cluster of one node on this machine: the control plane with its scheduler, containerd and runc, kubelet,
kube-proxy (iptables) and cluster DNS. Pods are real containers with a network of their own.

    node.py up          prints what there is as JSON, kubeconfig first
    node.py down        stops everything and undoes what `up` did to the machine; may be repeated, also after a crash
    node.py status

Needs root, and setup.sh and setup_node.sh done; images are those that build_images.sh has made. Addresses: 10.245.0.1
(API server, kubelet, DNS), pods in 10.244.0.0/24, Services in 10.96.0.0/16, all within reach from this machine alone.
One such node per machine. State is in $TANDEM_KUBE_HOME (~/.cache/tandem-kube): run/node and node.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import node_daemons
from kube_api import ApiError, Json, KubeApi
from node_system import NODE_IP, System, run
from run_directory import RunDirectory, StartError, home

TOOLS = Path(__file__).resolve().parent
CONTROL_PLANE = (sys.executable, TOOLS / "control_plane.py")
PORT = 6443
NEEDED = ("kubelet", "kube-proxy", "kube-scheduler", "containerd", "ctr", "runc")
DAEMONS = ("kubelet", "kube-proxy", "minidns")
START_S, DRAIN_S = 120.0, 60.0
POLL_S = 0.1
SOCKET_BYTES = 100
"""What a Unix socket's path may have."""


class Node:
    """The node and its cluster."""

    def __init__(self) -> None:
        self.binaries = home() / "bin"
        self.state = home() / "node"
        self.socket = self.state / "containerd.sock"
        self.system = System(self.state)
        self.cluster = RunDirectory(home() / "run" / "node")
        """Control plane, kubelet, kube-proxy, DNS."""
        self.runtime = RunDirectory(self.state)
        """containerd, whose images outlive a cluster."""
        self.volumes = self.state / "kubelet"

    def up(self) -> Json:
        """What there is then. Raises `StartError`; then `down` undoes what had been done."""
        self._check()
        begin = time.monotonic()
        self.state.mkdir(parents=True, exist_ok=True)
        self.system.prepare()
        self.runtime.spawn("containerd", node_daemons.containerd(self.state, self.socket, self.binaries))
        self._wait("containerd answers", self._containerd_answers)
        self._import_images()
        control = subprocess.run(
            [*CONTROL_PLANE, "start", "--run", "node", "--scheduler", "--listen", NODE_IP, "--port", str(PORT)],
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        if control.returncode:
            raise StartError("the control plane did not start")
        commands = {
            "kubelet": node_daemons.kubelet(self.cluster, self.socket, self.binaries, self.volumes),
            "kube-proxy": node_daemons.kube_proxy(self.cluster, self.binaries),
            "minidns": node_daemons.dns(self.cluster),
        }
        for name, command in commands.items():
            self.cluster.spawn(name, command)
        api = KubeApi(self.cluster.kubeconfig)
        self._wait("the node is Ready", lambda: api.condition(f"/api/v1/nodes/{node_daemons.NODE}", "Ready"))
        found: Json = json.loads(control.stdout)
        return {**found, "node": self._versions(api), "seconds": round(time.monotonic() - begin, 1)}

    def down(self) -> None:
        """In this order: no new pods; end the pods, whose mounts and networks kubelet undoes; then the rest."""
        self.cluster.stop("kube-scheduler")
        if self.cluster.pid("kubelet"):
            try:
                self._end_pods(KubeApi(self.cluster.kubeconfig))
            except (ApiError, OSError) as error:
                print(f"node.py: pods did not end by themselves: {error}", file=sys.stderr)
        for name in DAEMONS:
            self.cluster.stop(name)
        if self.runtime.pid("containerd"):
            self._remove_containers()
        self.cluster.stop_all()
        for pid in self._shims():
            os.kill(pid, signal.SIGTERM)
        self.runtime.stop("containerd")
        if self.state.exists():
            self.system.restore(self.volumes, self.state)
            shutil.rmtree(self.volumes, ignore_errors=True)

    def status(self) -> int:
        """0 when everything runs."""
        states = self._daemons()
        for name, pid in states.items():
            print(f"{name:26s} {f'running, pid {pid}' if pid else 'ended'}")
        control = subprocess.run([*CONTROL_PLANE, "status", "--run", "node"], check=False)
        return 0 if all(states.values()) and control.returncode == 0 else 1

    def _daemons(self) -> dict[str, int | None]:
        return {"containerd": self.runtime.pid("containerd"), **{name: self.cluster.pid(name) for name in DAEMONS}}

    def _check(self) -> None:
        if os.geteuid() != 0:
            raise StartError("root is needed")
        missing = [name for name in NEEDED if not (self.binaries / name).exists()]
        if missing:
            raise StartError(f"{', '.join(missing)} missing in {self.binaries}: run {TOOLS / 'setup_node.sh'}")
        if len(str(self.socket)) > SOCKET_BYTES:
            raise StartError(f"{self.socket} is too long for a socket: choose a shorter TANDEM_KUBE_HOME")
        if self.runtime.pid("containerd") or self.cluster.pid("kubelet"):
            raise StartError("it is up already, or half up: node.py down")
        if Path("/sys/fs/cgroup/cgroup.controllers").exists():
            print("node.py: warning: kubelet 1.20 was tried on cgroup v1 and hybrid, not on v2 alone", file=sys.stderr)

    def _wait(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_so():
            for name, pid in self._daemons().items():
                directory = self.runtime if name == "containerd" else self.cluster
                if pid is None and directory.log(name).exists():
                    raise StartError(f"{name} ended: see {directory.log(name)}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"not within {START_S:g} s: {what}; logs are in {self.cluster.directory} and {self.state}"
                )
            time.sleep(POLL_S)

    def _ctr(self, *words: object) -> str:
        return run(self.binaries / "ctr", "--address", self.socket, "--namespace", "k8s.io", *words)

    def _containerd_answers(self) -> bool:
        try:
            self._ctr("version")
        except subprocess.CalledProcessError:
            return False
        return True

    def _import_images(self) -> None:
        """Each version of an archive once."""
        stamps = self.state / "imported"
        stamps.mkdir(exist_ok=True)
        for archive in sorted((home() / "images").glob("*.tar")):
            stamp = stamps / archive.name
            if not stamp.exists() or stamp.stat().st_mtime < archive.stat().st_mtime:
                self._ctr("images", "import", archive)
                stamp.touch()

    def _versions(self, api: KubeApi) -> Json:
        info = api.get(f"/api/v1/nodes/{node_daemons.NODE}")["status"]["nodeInfo"]
        return {key: info[key] for key in ("kubeletVersion", "containerRuntimeVersion", "kernelVersion", "osImage")}

    def _end_pods(self, api: KubeApi) -> None:
        """Controllers that make pods go first. Raises `TimeoutError`."""
        for group in ("apps/v1/deployments", "apps/v1/replicasets", "apps/v1/statefulsets"):
            for one in api.get(f"/apis/{group}")["items"]:
                place = f"/apis/apps/v1/namespaces/{one['metadata']['namespace']}/{group.rpartition('/')[2]}"
                _delete(api, f"{place}/{one['metadata']['name']}", propagationPolicy="Background")
        deadline = time.monotonic() + DRAIN_S
        asked = set()
        while pods := api.get("/api/v1/pods")["items"]:
            for pod in pods:
                meta = pod["metadata"]
                if meta["uid"] not in asked:
                    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
                    _delete(api, path, gracePeriodSeconds=1)
                    asked.add(meta["uid"])
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(pods)} pods are left after {DRAIN_S:g} s")
            time.sleep(POLL_S)

    def _remove_containers(self) -> None:
        """Of pods that kubelet could not end properly: kill, remove, delete the network namespace."""
        for name in self._ctr("containers", "list", "--quiet").split():
            spec = json.loads(self._ctr("containers", "info", name)).get("Spec", {})
            spaces = [one.get("path", "") for one in spec.get("linux", {}).get("namespaces", [])]
            for words in (("tasks", "kill", "--signal", "KILL", name), ("tasks", "delete", "--force", name)):
                run(self.binaries / "ctr", "--address", self.socket, "--namespace", "k8s.io", *words, check=False)
            self._ctr("containers", "delete", name)
            for space in spaces:
                if "/netns/cni-" in space:
                    run("ip", "netns", "delete", Path(space).name, check=False)
            Path(f"/var/lib/cni/results/cni-loopback-{name}-lo").unlink(missing_ok=True)

    def _shims(self) -> list[int]:
        """They outlive containerd by design; ours name our socket."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if words[0].endswith("containerd-shim-runc-v2") and str(self.socket) in words:
                found.append(int(path.parent.name))
        return found


def _delete(api: KubeApi, path: str, **options: Any) -> None:
    """Also what the garbage collector has deleted since it was listed."""
    try:
        api.delete(path, **options)
    except ApiError as error:
        if error.status != 404:
            raise


def main() -> int:
    """Exit status."""
    verb = sys.argv[1] if len(sys.argv) == 2 else ""
    node = Node()
    # containerd looks for its shim, and CNI plugins for iptables, on the path.
    os.environ["PATH"] = f"{node.binaries}:{os.environ['PATH']}:/usr/sbin:/sbin"
    try:
        if verb == "up":
            print(json.dumps(node.up()), flush=True)
            return 0
        if verb == "down":
            node.down()
            return 0
        if verb == "status":
            return node.status()
    except (StartError, ApiError, subprocess.CalledProcessError) as error:
        print(f"node.py: {error}", file=sys.stderr)
        return 1
    print(__doc__)
    return 0 if verb in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
