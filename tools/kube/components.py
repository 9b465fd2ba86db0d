"""Command lines of the parts of a control plane."""

from __future__ import annotations

import sys
from pathlib import Path

from run_directory import RunDirectory, free_port

SERVICE_CIDR, KUBERNETES_SERVICE_IP = "10.96.0.0/16", "10.96.0.1"
LOOPBACK = "127.0.0.1"
TOOLS = Path(__file__).resolve().parent

Command = list[object]


def etcd(run: RunDirectory, binary: Path, client_url: str) -> Command:
    """Without fsync: the data of a test need not outlive the machine."""
    peer_url = f"http://{LOOPBACK}:{free_port()}"
    return [
        *(binary, "--data-dir", run.directory / "etcd", "--unsafe-no-fsync"),
        *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
        *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", f"default={peer_url}"),
    ]


def apiserver(run: RunDirectory, binary: Path, etcd_url: str, listen: str, port: int) -> Command:
    """Aggregates the CRD engine as front proxy; tokens of tokens.csv, roles by RBAC."""
    file = run.certificates.path
    return [
        *(binary, "--etcd-servers", etcd_url, "--bind-address", listen, "--secure-port", port),
        *("--advertise-address", listen),
        # An endpoint on 127.0.0.1 is refused, so the `kubernetes` Service has one only on a real node.
        *("--endpoint-reconciler-type", "none" if listen == LOOPBACK else "lease"),
        *("--tls-cert-file", file("apiserver.crt"), "--tls-private-key-file", file("apiserver.key")),
        *("--kubelet-client-certificate", file("apiserver.crt"), "--kubelet-client-key", file("apiserver.key")),
        *("--kubelet-preferred-address-types", "InternalIP,Hostname"),
        *("--client-ca-file", file("ca.crt"), *_front_proxy(run)),
        *("--proxy-client-cert-file", file("front-proxy.crt"), "--proxy-client-key-file", file("front-proxy.key")),
        *("--token-auth-file", run.directory / "tokens.csv", "--authorization-mode", "Node,RBAC"),
        *("--service-cluster-ip-range", SERVICE_CIDR, "--service-account-issuer", "https://kubernetes.default.svc"),
        *("--service-account-key-file", file("sa.pub"), "--service-account-signing-key-file", file("sa.key")),
        *("--allow-privileged=true", "--cert-dir", run.directory / "apiserver-certs"),
        *("--audit-policy-file", TOOLS / "audit_policy.yaml", "--audit-log-path", run.directory / "audit.log"),
    ]


def controller_manager(run: RunDirectory, binary: Path) -> Command:
    """Deployments, garbage collection, disruption budgets, autoscalers."""
    file = run.certificates.path
    return [
        *(binary, "--kubeconfig", run.kubeconfig_cert, "--leader-elect=false"),
        *("--use-service-account-credentials=true", "--service-account-private-key-file", file("sa.key")),
        *("--root-ca-file", file("ca.crt")),
        *("--cluster-signing-cert-file", file("ca.crt"), "--cluster-signing-key-file", file("ca.key")),
        # Without --port=0 release 1.20 opens an insecure port on all addresses as well.
        *("--bind-address", LOOPBACK, "--secure-port", free_port(), "--port=0"),
        *("--horizontal-pod-autoscaler-sync-period=2s", "--pvclaimbinder-sync-period=2s"),
        # With the default of 20 requests a second that is what tests of many Deployments would measure.
        *("--kube-api-qps", "300", "--kube-api-burst", "600"),
    ]


def scheduler(run: RunDirectory, binary: Path) -> Command:
    """Binds pods to nodes by their requests."""
    return [
        *(binary, "--kubeconfig", run.kubeconfig_cert, "--leader-elect=false"),
        *("--bind-address", LOOPBACK, "--secure-port", free_port(), "--port=0"),
        "--authentication-skip-lookup=true",
    ]


def crd_engine(run: RunDirectory, binary: Path, etcd_url: str, port: int) -> Command:
    """Today's code for custom resources."""
    file, kubeconfig = run.certificates.path, run.kubeconfig_cert
    return [
        *(binary, "--etcd-servers", etcd_url, "--etcd-prefix", "/registry/crd-engine"),
        *("--bind-address", LOOPBACK, "--secure-port", port),
        *("--tls-cert-file", file("apiserver.crt"), "--tls-private-key-file", file("apiserver.key")),
        *("--client-ca-file", file("ca.crt"), *_front_proxy(run), "--kubeconfig", kubeconfig),
        *("--authentication-kubeconfig", kubeconfig, "--authorization-kubeconfig", kubeconfig),
        *("--authentication-skip-lookup", "--enable-priority-and-fairness=false"),
        # Current servers answer lists from their cache once etcd has confirmed that it is up to date, which the etcd
        # 3.4 of bookworm cannot do: lists would fail with 504 now and then.
        "--watch-cache=false",
        # These watch API groups that 1.20 does not have.
        "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
    ]


def crd_aggregator(run: RunDirectory, port: int) -> Command:
    """Routes the groups of CRDs to the engine on `port`."""
    script = (sys.executable, TOOLS / "crd_aggregator.py")
    return [*script, "--kubeconfig", run.kubeconfig_cert, "--port", port, "--ca-file", run.certificates.path("ca.crt")]


def fake_kubelet(run: RunDirectory, nodes: int, *, bind: bool) -> Command:
    """Nodes without containers; `bind`: it also does the scheduler's work."""
    command: Command = [sys.executable, TOOLS / "fake_kubelet.py", "--kubeconfig", run.kubeconfig, "--nodes", nodes]
    return [*command, "--bind"] if bind else command


def _front_proxy(run: RunDirectory) -> Command:
    """How an aggregated server recognizes requests that the main API server passes on."""
    return [
        *("--requestheader-client-ca-file", run.certificates.path("ca.crt")),
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    ]
