"""A small Kubernetes API client on the standard library alone: the tools here start before anything is installed.

api = KubeApi(kubeconfig)
api.get("/api/v1/nodes")
for event in api.watch("/api/v1/pods"): …
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
UNAVAILABLE = (404, 503)
"""What a resource answers that is not served, or whose server is not there yet."""


class ApiError(Exception):
    """An answer of the API server with a status of 400 or more."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        try:
            parsed = json.loads(body)
            self.reason, self.message = parsed.get("reason", ""), parsed.get("message", "")
        except (ValueError, AttributeError):
            self.reason, self.message = "", body.decode(errors="replace").strip()
        super().__init__(f"{status} {self.reason}: {self.message}")


class KubeApi:
    """Requests to one API server; threads may share it, each has a connection of its own.

    Reads the kubeconfigs that `control_plane.py` writes: JSON, with a token or the files of a client certificate.
    """

    def __init__(self, kubeconfig: Path, timeout_s: float = 30.0) -> None:
        config = json.loads(kubeconfig.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        server = urllib.parse.urlsplit(cluster["server"])
        self._host, self._port = server.hostname or "", server.port or 443
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._headers = {"Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        else:
            self._tls.load_cert_chain(user["client-certificate"], user["client-key"])
        self._local = threading.local()

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> Json:
        """Send one request and return the parsed answer. Raises `ApiError` for a status of 400 and more."""
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": content_type} if data is not None else {})
        status, answer = self._exchange(method, target, data, headers)
        if status >= 400:
            raise ApiError(status, answer)
        parsed: Json = json.loads(answer) if answer else {}
        return parsed

    def get(self, path: str, **query: str) -> Json:
        """The object or list at `path`."""
        return self.request("GET", path, query=query)

    def create(self, path: str, obj: Json) -> Json:
        """POST to a collection or a subresource."""
        return self.request("POST", path, obj)

    def merge(self, path: str, patch: Json) -> Json:
        """JSON merge patch: what is None goes away."""
        return self.request("PATCH", path, patch, content_type=MERGE_PATCH)

    def apply(self, path: str, obj: Json, manager: str) -> Json:
        """Server-side apply at the path of the object itself; takes fields from other managers."""
        query = {"fieldManager": manager, "force": "true"}
        return self.request("PATCH", path, obj, content_type=APPLY_PATCH, query=query)

    def delete(self, path: str, **options: Any) -> Json:
        """Delete with `DeleteOptions`, e.g. gracePeriodSeconds=0."""
        return self.request("DELETE", path, options or None)

    def watch(self, path: str, timeout_s: int = 300) -> Iterator[Json]:
        """Events of a list: first ADDED for all that is there, then changes, until the timeout."""
        connection = self._connect(timeout_s + 15)
        try:
            query = urllib.parse.urlencode({"watch": "true", "timeoutSeconds": timeout_s})
            connection.request("GET", f"{path}?{query}", headers=self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise ApiError(response.status, response.read())
            for line in response:
                event: Json = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(event["object"].get("code", 500), json.dumps(event["object"]).encode())
                yield event
        finally:
            connection.close()

    def condition(self, path: str, kind: str) -> bool:
        """Whether condition `kind` of the object at `path` is True; False also when there is no object."""
        try:
            conditions = self.get(path).get("status", {}).get("conditions") or []
        except ApiError as error:
            if error.status in UNAVAILABLE:
                return False
            raise
        return any(one["type"] == kind and one["status"] == "True" for one in conditions)

    def _exchange(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        while True:
            reused: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
            connection = reused or self._connect(self._timeout_s)
            self._local.connection = connection
            try:
                connection.request(method, target, data, headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError):
                connection.close()
                self._local.connection = None
                if reused is None:
                    raise
                # The server had closed the idle connection: once more, on a new one.

    def _connect(self, timeout_s: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)


def _named(items: list[Json], name: str) -> Json:
    return next(item for item in items if item["name"] == name)
