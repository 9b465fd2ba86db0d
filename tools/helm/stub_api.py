"""An API server that only answers what Helm asks before it installs: discovery, and "created" to every object.

The Helm library renders a chart by installing it. What the chart sees as Capabilities are the Kubernetes version and
the kinds of the stub, so that one chart can be rendered for old and new clusters.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]

# group/version -> kinds; "!" marks kinds without a namespace
KINDS: Mapping[str, str] = {
    "v1": "Namespace! ConfigMap Secret Service ServiceAccount Pod",
    "apps/v1": "Deployment",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole! ClusterRoleBinding!",
    "policy/v1": "PodDisruptionBudget",
    "policy/v1beta1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "NetworkPolicy",
    "monitoring.coreos.com/v1": "PodMonitor ServiceMonitor",
    "tandem.dev/v1beta1": "ModelService",
}
VERBS = ["create", "get", "list", "patch", "update", "delete", "watch"]


@contextmanager
def stub_api(kube_version: str, without: tuple[str, ...]) -> Iterator[Json]:
    """Serves on loopback while the block runs; gives the kubeconfig. `without`: group/versions it shall not have."""
    resources = {key: kinds for key, kinds in KINDS.items() if key not in without}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(kube_version, resources))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield _kubeconfig(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _kubeconfig(url: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "stub",
        "clusters": [{"name": "stub", "cluster": {"server": url}}],
        "users": [{"name": "stub", "user": {}}],
        "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
    }


def _handler(kube_version: str, resources: Mapping[str, str]) -> type[BaseHTTPRequestHandler]:
    major, minor = kube_version.split(".")[:2]
    version = {"major": major, "minor": minor, "gitVersion": f"v{kube_version}"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            group_version = path.removeprefix("apis/").removeprefix("api/")
            if path == "version":
                self._answer(200, version)
            elif path == "api":
                self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
            elif path == "apis":
                self._answer(200, _groups(resources))
            elif group_version in resources:
                self._answer(200, _resource_list(group_version, resources[group_version]))
            elif path.endswith("secrets"):  # releases there are: none
                none = {"kind": "SecretList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}
                self._answer(200, none)
            else:
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
                self._answer(404, status)

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
            if data.startswith(b"k8s\0"):  # Helm writes the release, a Secret, as protobuf
                written: Json = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "release"}}
            else:
                written = json.loads(data)
            written.setdefault("metadata", {}).update(uid="0", resourceVersion="1")
            self._answer(201, written)

        do_PUT = do_PATCH = do_POST  # noqa: N815 - names that the base class calls

        def _answer(self, code: int, body: Json) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _groups(resources: Mapping[str, str]) -> Json:
    versions: dict[str, list[Json]] = {}
    for group_version in resources:
        group, _, version = group_version.rpartition("/")
        if group:
            versions.setdefault(group, []).append({"groupVersion": group_version, "version": version})
    groups = [
        {"name": group, "versions": offered, "preferredVersion": offered[0]} for group, offered in versions.items()
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resource_list(group_version: str, kinds: str) -> Json:
    resources = [
        {
            "name": _plural(kind.rstrip("!")),
            "singularName": "",
            "kind": kind.rstrip("!"),
            "namespaced": not kind.endswith("!"),
            "verbs": VERBS,
        }
        for kind in kinds.split()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}


def _plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
