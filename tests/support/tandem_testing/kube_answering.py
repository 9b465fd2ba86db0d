"""Answers over HTTP for the containers of pods that fake kubelets run: workers that stand by, gateways with canaries.

    pod with an address ─▶ a server on each of its ports ─▶ worker: /ready, /offer      gateway: /canary
                                                                          and /operator/adapters
    /offer ─▶ the annotation that keeps the pod from being Ready goes, as a readiness probe would find

Canaries pass for the revisions that `passing` names. Everything that was asked is in `journal`, in order.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tandem_operator.builders.naming import REVISION_LABEL
from tandem_testing.control_plane import Manifest
from tandem_testing.kube_services import Services

POLL_S = 0.05
NOT_READY = "fake-kubelet/ready"
WORKER_PODS = {"annotations": {"fake-kubelet/loopback": "true", NOT_READY: "false"}}
GATEWAY_PODS = {"annotations": {"fake-kubelet/loopback": "true"}}


@dataclass
class Answering:
    """Make it with `answering`."""

    services: Services
    passing: Callable[[str], bool] = lambda _: True
    """Whether canaries of this revision pass."""
    broken: Callable[[str], bool] = lambda _: False
    """Whether they fail through this pod all the same."""
    poll_s: float = POLL_S
    """How often new pods are looked for."""
    journal: list[tuple[str, str]] = field(default_factory=list)
    """What was asked of which revision: canary, passed or offer; "" is whatever the router chooses."""
    offered: set[str] = field(default_factory=set)
    """Names of pods."""
    adapters: dict[str, Manifest] = field(default_factory=dict)
    """What gateways have registered, by name; all workers have it in memory."""
    refused: dict[str, Manifest] = field(default_factory=dict)
    """Reports of commands that fail, by the name of the adapter."""
    announced: list[str] = field(default_factory=list)
    """Names whose requests wait at gateways until they are registered."""
    _pods: dict[str, Manifest] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spec(self, **fields: Any) -> dict[str, Any]:
        """Fields of a ModelService whose pods are answered for."""
        spec: dict[str, Any] = {"gateway": {"pod": GATEWAY_PODS}, **fields}
        for role in ("prefill", "decode"):
            spec[role] = {**spec.get(role, {}), "pod": WORKER_PODS}
        return spec

    def requests_of(self, revision: str) -> list[str]:
        """What was asked of a revision, in order."""
        with self._lock:
            return [what for what, asked in self.journal if asked == revision]

    def follow(self, ended: threading.Event) -> None:
        """Serve for pods that come, until `ended`."""
        servers: list[ThreadingHTTPServer] = []
        while not ended.wait(self.poll_s):
            for component in ("worker", "gateway"):
                for pod in self.services.pods(component, None):
                    name, address = pod["metadata"]["name"], pod["status"].get("podIP")
                    if name not in self._pods and address:
                        self._pods[name] = pod
                        servers.append(self._server(name, component, address))
        # Each takes half a second to end.
        with ThreadPoolExecutor(max_workers=64) as closing:
            list(closing.map(_close, servers))

    def _server(self, pod: str, component: str, address: str) -> ThreadingHTTPServer:
        answering = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*answering.ready(pod, self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = self.headers["Authorization"].startswith("Bearer ")
                self._send(*(answering.order(pod, self.path, body) if known else (403, {})))

            def _send(self, status: int, answer: Manifest) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer((address, 9090 if component == "worker" else 8001), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def ready(self, pod: str, path: str) -> tuple[int, Manifest]:
        """GET of a pod."""
        if path.partition("?")[0] == "/operator/adapters":
            return 200, {"adapters": list(self.adapters.values()), "announced": self.announced}
        if path != "/ready":
            return 404, {}
        return (200, {"status": "ok"}) if pod in self.offered else (503, {"status": "standby", "reasons": []})

    def order(self, pod: str, path: str, body: Manifest) -> tuple[int, Manifest]:
        """POST of a pod."""
        if path == "/canary":
            revision = self._revision(body["prefill"]) if "prefill" in body else ""
            through = [body[role] for role in ("prefill", "decode") if role in body]
            passed = self.passing(revision) and not any(map(self.broken, through))
            self._note("passed" if passed else "canary", revision)
            return 200, {"passed": passed, "message": "as the test says"}
        if path.startswith("/operator/adapters/"):
            return 200, self._adapter(path.rpartition("/")[2], body)
        if path == "/hold":
            return 200, {"message": "stands by"}
        self._note("offer", self._revision(pod))
        self.offered.add(pod)
        path = f"/api/v1/namespaces/{self.services.namespace}/pods/{pod}"
        body = {"metadata": {"annotations": {NOT_READY: None}}}
        self.services.cluster.merge(path, body).raise_for_status()
        return 200, {"message": "offered"}

    def _adapter(self, command: str, body: Manifest) -> Manifest:
        if command == "announce":
            self.announced = body["lora_names"]
            return {"done": True, "message": command}
        name = body["lora_name"]
        self._note(command, name)
        if name in self.refused:
            return self.refused[name]
        if command == "unload":
            self.adapters.pop(name, None)
        else:
            workers = [pod["metadata"]["name"] for pod in self.services.pods("worker", None)]
            digest = body["digest"] or "d" * 32
            folder = body["lora_path"]
            self.adapters[name] = {"name": name, "digest": digest, "folder": folder, "workers": workers}
        return {"done": True, "message": command}

    def _note(self, what: str, revision: str) -> None:
        with self._lock:
            self.journal.append((what, revision))

    def _revision(self, pod: str) -> str:
        revision: str = self._pods[pod]["metadata"]["labels"][REVISION_LABEL]
        return revision


def _close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


@contextmanager
def answering(services: Services, *, poll_s: float = POLL_S) -> Iterator[Answering]:
    """For all pods of one namespace."""
    ended, one = threading.Event(), Answering(services, poll_s=poll_s)
    thread = threading.Thread(target=one.follow, args=(ended,), name="answering")
    thread.start()
    try:
        yield one
    finally:
        ended.set()
        thread.join()
