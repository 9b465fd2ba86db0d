#!/usr/bin/env python3
"""A local Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager, the current CRD engine and,
where asked for, kube-scheduler and nodes without containers. No container runtime, no root.

    control_plane.py start [options]    in the background; prints what there is as JSON, kubeconfig first
    control_plane.py hold [options]     the same, until standard input ends or SIGTERM: then everything is stopped
    control_plane.py stop [--run NAME]
    control_plane.py status [--run NAME]

A run keeps everything (certificates, logs, etcd data, pids) in $TANDEM_KUBE_HOME/run/NAME (~/.cache/tandem-kube) and
begins empty. Runs of different names live side by side: ports are free ones. The binaries come from setup.sh.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import components
from kube_api import ApiError, Json, KubeApi
from run_directory import COMPONENTS, RunDirectory, StartError, free_port, home

SETUP = Path(__file__).resolve().with_name("setup.sh")
HOSTS = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "crd-engine.kube-system.svc")
"""What the servers' certificate is for, beside addresses."""
CRD_ROUTE = "/apis/apiregistration.k8s.io/v1/apiservices/v1.apiextensions.k8s.io"
AGGREGATION_S = 60.0


class ControlPlane:
    """Starts the parts in the order in which they need each other."""

    def __init__(self, run: RunDirectory, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.etcd_url = f"http://{components.LOOPBACK}:{free_port()}"
        self.port = options.port or free_port()
        self.server = f"https://{options.listen}:{self.port}"

    def start(self) -> Json:
        """What there is then: kubeconfig, server, version, seconds. Raises `StartError`; nothing runs then."""
        self._check_tools()
        begin = time.monotonic()
        self.run.prepare()
        self._write_credentials()
        try:
            self._start_parts()
        except BaseException:
            self.run.stop_all()
            raise
        return {
            "kubeconfig": str(self.run.kubeconfig),
            "server": self.server,
            "version": KubeApi(self.run.kubeconfig).get("/version")["gitVersion"],
            "seconds": round(time.monotonic() - begin, 1),
        }

    def _check_tools(self) -> None:
        wanted = ["etcd", "kube-apiserver", "kube-controller-manager"]
        wanted += ["kube-scheduler"] * self.options.scheduler + ["crdserver"] * self.options.crd_engine
        missing = [name for name in wanted if not (home() / "bin" / name).exists()]
        if missing:
            raise StartError(f"{', '.join(missing)} missing in {home() / 'bin'}: run {SETUP}")
        if not shutil.which("openssl"):
            raise StartError("openssl is missing: apt-get install -y openssl")

    def _write_credentials(self) -> None:
        run = self.run
        addresses = sorted({components.LOOPBACK, components.KUBERNETES_SERVICE_IP, self.options.listen})
        run.certificates.create(hosts=HOSTS, addresses=addresses)
        token = secrets.token_urlsafe(24)
        tokens = run.directory / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{token},admin-token,admin-token,"system:masters"\n')
        run.write_kubeconfig(run.kubeconfig, self.server, {"token": token})
        files = {"client-certificate": "admin.crt", "client-key": "admin.key"}
        user = {key: run.certificates.path(name) for key, name in files.items()}
        run.write_kubeconfig(run.kubeconfig_cert, self.server, user)

    def _start_parts(self) -> None:
        run, options, binaries = self.run, self.options, home() / "bin"
        run.spawn("etcd", components.etcd(run, binaries / "etcd", self.etcd_url))
        apiserver = components.apiserver(run, binaries / "kube-apiserver", self.etcd_url, options.listen, self.port)
        run.spawn("kube-apiserver", apiserver)
        run.wait_http(f"{self.server}/readyz")
        manager = components.controller_manager(run, binaries / "kube-controller-manager")
        run.spawn("kube-controller-manager", manager)
        if options.scheduler:
            run.spawn("kube-scheduler", components.scheduler(run, binaries / "kube-scheduler"))
        if options.fake_nodes:
            run.spawn("fake-kubelet", components.fake_kubelet(run, options.fake_nodes, bind=not options.scheduler))
        if options.crd_engine:
            self._start_crd_engine(binaries / "crdserver")
        # Without the default service account no pod is admitted.
        run.wait_http(f"{self.server}/api/v1/namespaces/default/serviceaccounts/default")
        for number in range(options.fake_nodes):
            run.wait_http(f"{self.server}/api/v1/nodes/fake-{number}")

    def _start_crd_engine(self, binary: Path) -> None:
        run, port = self.run, free_port()
        run.spawn("crdserver", components.crd_engine(run, binary, self.etcd_url, port))
        run.wait_http(f"https://{components.LOOPBACK}:{port}/readyz")
        run.spawn("crd-aggregator", components.crd_aggregator(run, port))
        api = KubeApi(run.kubeconfig_cert)
        deadline = time.monotonic() + AGGREGATION_S
        while "service" not in api.get(CRD_ROUTE)["spec"] or not api.condition(CRD_ROUTE, "Available"):
            run.check_alive()
            if time.monotonic() > deadline:
                raise StartError(f"custom resources are not routed to the engine: see {run.log('crd-aggregator')}")
            time.sleep(0.05)


def start(run: RunDirectory, options: argparse.Namespace) -> int:
    say(ControlPlane(run, options).start())
    return 0


def say(info: Json) -> None:
    print(json.dumps(info), flush=True)


def hold(run: RunDirectory, options: argparse.Namespace) -> int:
    """The parent process may die in any way: the pipe to our standard input ends with it."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def follow_input() -> None:
        sys.stdin.read()
        ended.set()

    info = ControlPlane(run, options).start()
    try:
        say(info)
        threading.Thread(target=follow_input, daemon=True).start()
        ended.wait()
    except BrokenPipeError:
        return 1  # the reader of the report has exited
    finally:
        run.stop_all()
        shutil.rmtree(run.directory / "etcd", ignore_errors=True)
    return 0


def stop(run: RunDirectory, options: argparse.Namespace) -> int:
    for name in options.component or COMPONENTS:
        run.stop(name)
    return 0


def status(run: RunDirectory, _: argparse.Namespace) -> int:
    """0 only when everything that was started is alive."""
    states = {name: run.pid(name) for name in reversed(run.started())}
    for name, pid in states.items():
        print(f"{name:26s} {f'running, pid {pid}' if pid else 'ended'}")
    if not states:
        print(f"nothing runs in {run.directory}")
        return 1
    print(f"KUBECONFIG={run.kubeconfig}")
    return 0 if all(states.values()) else 1


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = top.add_subparsers(dest="action", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--run", default="default", help="name below $TANDEM_KUBE_HOME/run, or a path (default: default)"
    )
    begin = argparse.ArgumentParser(add_help=False)
    begin.add_argument(
        "--scheduler", action="store_true", help="kube-scheduler; without it fake nodes bind pods in turn"
    )
    begin.add_argument(
        "--fake-nodes", type=int, default=0, metavar="N", help="nodes on which pods turn ready by themselves"
    )
    begin.add_argument(
        "--no-crd-engine",
        dest="crd_engine",
        action="store_false",
        help="custom resources by 1.20's own code, without CEL",
    )
    begin.add_argument("--listen", default=components.LOOPBACK, help="address of the API server (default 127.0.0.1)")
    begin.add_argument("--port", type=int, help="port of the API server (default: a free one)")
    actions.add_parser("start", parents=[common, begin]).set_defaults(function=start)
    actions.add_parser("hold", parents=[common, begin]).set_defaults(function=hold)
    end = actions.add_parser("stop", parents=[common])
    end.add_argument("--component", action="append", choices=COMPONENTS, help="only this one; repeatable")
    end.set_defaults(function=stop)
    actions.add_parser("status", parents=[common]).set_defaults(function=status)
    return top


def main() -> int:
    options = parser().parse_args()
    directory = Path(options.run) if "/" in options.run else home() / "run" / options.run
    try:
        return int(options.function(RunDirectory(directory.resolve()), options))
    except (StartError, ApiError) as error:
        print(f"control_plane.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
