"""The folder of one control plane: certificates, kubeconfigs, logs, and the processes recorded by pid.

empty ─▶ spawn … ─▶ stop (in the order of COMPONENTS)     the folder stays, for its logs
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from certificates import Certificates
from kube_api import Json

COMPONENTS = (
    "fake-kubelet",
    "kube-scheduler",
    "kube-controller-manager",
    "crd-aggregator",
    "crdserver",
    "kube-apiserver",
    "etcd",
)
"""In the order in which they are stopped."""
MARKER = ".tandem-kube-run"
PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections, which could take a port before we listen on it."""
LOG_LINES = 5
POLL_S = 0.05


class StartError(Exception):
    """A control plane that does not come up, with the reason and what to do."""


def home() -> Path:
    """The folder that holds all state: binaries, sources, runs."""
    return Path(os.environ.get("TANDEM_KUBE_HOME") or Path.home() / ".cache" / "tandem-kube").resolve()


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StartError(f"found no free port between {PORTS.start} and {PORTS.stop} on 127.0.0.1")


class RunDirectory:
    """One control plane's folder and processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificates = Certificates(directory / "certs")
        self.kubeconfig = directory / "kubeconfig"
        """Of an administrator, with a bearer token."""
        self.kubeconfig_cert = directory / "kubeconfig-cert"
        """The same with a client certificate."""

    def prepare(self) -> None:
        """Empty it. Raises `StartError` when it is in use, or not ours to empty."""
        if self.directory.exists() and any(self.directory.iterdir()):
            if not (self.directory / MARKER).exists():
                raise StartError(f"{self.directory} is not empty and no run of this tool: choose another --run")
            alive = [name for name in COMPONENTS if self.pid(name)]
            if alive:
                raise StartError(f"{self.directory} is running ({', '.join(alive)}): stop it first")
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / MARKER).touch()

    def spawn(self, name: str, command: Sequence[object]) -> None:
        """Start a component in a session of its own, with a log and a pid file."""
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        start_time = _process_state(process.pid)[1]
        self._pid_file(name).write_text(f"{process.pid} {start_time}\n")

    def log(self, name: str) -> Path:
        """The log of a component."""
        return self.directory / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """Of a running component; None when it is gone, or when its number is another process's by now."""
        try:
            pid, start_time = self._pid_file(name).read_text().split()
        except FileNotFoundError:
            return None
        state, running_since = _process_state(int(pid))
        return int(pid) if running_since == start_time and state != "Z" else None

    def started(self) -> list[str]:
        """Components that were started and not stopped since."""
        return [name for name in COMPONENTS if self._pid_file(name).exists()]

    def stop(self, name: str, timeout_s: float = 10.0) -> None:
        """End a component, by its pid; nothing happens when it does not run."""
        pid = self.pid(name)
        if pid:
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            while self.pid(name) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if self.pid(name):
                os.kill(pid, signal.SIGKILL)
        self._pid_file(name).unlink(missing_ok=True)

    def stop_all(self) -> None:
        """End everything that was started."""
        for name in COMPONENTS:
            self.stop(name)

    def check_alive(self) -> None:
        """Raises `StartError` with the last lines of its log when a component has ended."""
        for name in self.started():
            if self.pid(name) is None:
                lines = self.log(name).read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise StartError("\n  ".join([f"{name} ended; the end of {self.log(name)}:", *lines]))

    def wait_http(self, url: str, timeout_s: float = 120.0) -> None:
        """Until `url` answers the administrator with 200. Raises `StartError` when it does not, or a component
        exits."""
        tls = ssl.create_default_context(cafile=self.certificates.path("ca.crt"))
        tls.load_cert_chain(self.certificates.path("admin.crt"), self.certificates.path("admin.key"))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_alive()
            try:
                with urllib.request.urlopen(url, context=tls, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_S)
        raise StartError(f"{url} is not ready after {timeout_s:g} s: see the logs in {self.directory}")

    def write_kubeconfig(self, path: Path, server: str, user: Json) -> None:
        """JSON, which is YAML too."""
        name = "tandem-kube"
        authority = self.certificates.path("ca.crt")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority": authority}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))

    def _pid_file(self, name: str) -> Path:
        return self.directory / f"{name}.pid"


def _process_state(pid: int) -> tuple[str, str]:
    """State and start time of a process from /proc; pid and start time together name it for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]
