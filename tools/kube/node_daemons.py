"""Configuration and command lines of what runs on a node: containerd, kubelet, kube-proxy, cluster DNS."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from components import Command
from kube_api import Json
from node_system import CGROUP, NODE_IP, POD_BRIDGE, POD_CIDR
from run_directory import RunDirectory

NODE = "node-0"
PAUSE_IMAGE = "localhost/pause:1"
TOOLS = Path(__file__).resolve().parent

CONTAINERD = """\
version = 2
root = "{state}/root"
state = "{state}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # without CAP_SYS_RESOURCE no process may lower its OOM score
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{binaries}/cni"
    conf_dir = "{state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
      BinaryName = "{binaries}/runc"
"""


def containerd(state: Path, socket: Path, binaries: Path) -> Command:
    """With the CNI network of the pods, which have no way out of the machine."""
    network: Json = {
        "type": "bridge",
        "bridge": POD_BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(state / "ipam"),
            "ranges": [[{"subnet": POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    (state / "cni").mkdir(exist_ok=True)
    _write(
        state / "cni" / "10-tandem.conflist", {"cniVersion": "0.4.0", "name": POD_BRIDGE, "plugins": [network, ports]}
    )
    config = state / "containerd.toml"
    config.write_text(CONTAINERD.format(state=state, socket=socket, pause=PAUSE_IMAGE, binaries=binaries))
    return [binaries / "containerd", "--config", config]


def kubelet(run: RunDirectory, socket: Path, binaries: Path, folder: Path) -> Command:
    """`folder` takes the pods' volumes. Only the memory of the machine is watched, not its disks."""
    for name in ("pki", "plugins"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    certificates = run.certificates
    config = run.directory / "kubelet.yaml"
    _write(
        config,
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": NODE_IP,
            "port": 10250,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(certificates.path("ca.crt"))},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "tlsCertFile": str(certificates.path("apiserver.crt")),
            "tlsPrivateKeyFile": str(certificates.path("apiserver.key")),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "clusterDomain": "cluster.local",
            "clusterDNS": [NODE_IP],
            "resolvConf": "/etc/resolv.conf",
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "maxOpenFiles": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "oomScoreAdj": 0,
            "volumePluginDir": str(folder / "plugins"),
        },
    )
    return [
        *(binaries / "kubelet", "--config", config, "--kubeconfig", run.kubeconfig_cert),
        *("--root-dir", folder, "--cert-dir", folder / "pki", "--hostname-override", NODE, "--node-ip", NODE_IP),
        *("--container-runtime=remote", f"--container-runtime-endpoint=unix://{socket}"),
    ]


def kube_proxy(run: RunDirectory, binaries: Path) -> Command:
    """By iptables; conntrack at zero leaves the kernel's limits as they are."""
    config = run.directory / "kube-proxy.yaml"
    untouched = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    _write(
        config,
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "bindAddress": "127.0.0.1",
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clusterCIDR": POD_CIDR,
            "hostnameOverride": NODE,
            "clientConnection": {"kubeconfig": str(run.kubeconfig_cert)},
            "conntrack": untouched,
        },
    )
    return [binaries / "kube-proxy", "--config", config]


def dns(run: RunDirectory) -> Command:
    """Names of Services and of pods behind headless ones."""
    return [sys.executable, TOOLS / "minidns.py", "--kubeconfig", run.kubeconfig_cert, "--listen", NODE_IP]


def _write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=1))
