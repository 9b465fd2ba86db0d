"""Access to the Kubernetes API server as kubectl has it, and connections to ports of pods through it.

`Access` comes from the official client: kubeconfig, context, namespace, credentials and their renewal. `Cluster` sends
plain JSON over httpx, since the client has no classes for ModelServices, and turns each error into one sentence with
the fix.

`PodStream` does what `kubectl port-forward` does, without a local port:

    httpx ─▶ PodStream ─▶ WebSocket to the API server ─▶ kubelet ─▶ 127.0.0.1:PORT within the pod

One connection is one WebSocket (`v4.channel.k8s.io`). The first byte of a message is its channel: 0 carries data both
ways, 1 carries errors of the kubelet; the first message of each contains the number of the port. Without a listening
port, no other user of this machine can use the connection. It arrives from the pod's own loopback, so no NetworkPolicy
blocks it.

The client library's own port-forward is not used: it copies in a thread that waits without a bound and that no error
ends.
"""

import argparse
import json
import ssl
import struct
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpcore
import httpx
import websocket

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_operator.api.model_service import GROUP, VERSION
from tandem_services.common.errors import ServiceError

Object = dict[str, Any]
API = f"apis/{GROUP}/{VERSION}"
SERVICES = "modelservices"
POOLS = "workerpools"
ADAPTERS = "modeladapters"
CACHES = "modelcaches"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE = "application/merge-patch+json"
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
PAGE = 500

MAX_OBJECTS = 20_000
"""Of one list: more than a namespace has."""


class ClusterError(ServiceError):
    """The API server rejects a request. The message contains the fix."""

    code = "cluster_error"

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """How to reach a cluster."""

    host: str
    """URL of the API server."""
    namespace: str
    tls: ssl.SSLContext | None
    server_name: str | None
    """What its certificate is for, where that is not the host."""
    proxy: str | None
    credentials: Any
    """The client's `Configuration`, which renews tokens when they are used."""

    def headers(self) -> dict[str, str]:
        """Of now."""
        setting = self.credentials.auth_settings().get("BearerToken")
        return {} if setting is None else {setting["key"]: setting["value"]}


def access_of(kubeconfig: Path | None, context: str | None, namespace: str | None) -> Access:
    """By kubeconfig or, in a pod without one, by its service account. Raises `ConfigError`."""
    from kubernetes import config
    from kubernetes.client import Configuration

    credentials = Configuration()
    try:
        own = _load(config, credentials, kubeconfig, context)
        tls = _tls(credentials)
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(_teach_kubeconfig(error, kubeconfig, context)) from error
    return Access(
        host=credentials.host,
        namespace=namespace or own,
        tls=tls,
        server_name=credentials.tls_server_name,
        proxy=credentials.proxy,
        credentials=credentials,
    )


def _load(config: Any, credentials: Any, kubeconfig: Path | None, context: str | None) -> str:
    """Fills `credentials`; returns the namespace to use when none is set."""
    file = None if kubeconfig is None else str(kubeconfig)
    if file is None and context is None and not _has_kubeconfig(config):
        if not SERVICE_ACCOUNT.exists():
            raise config.ConfigException("there is none, and this is no pod")
        config.load_incluster_config(client_configuration=credentials)
        return (SERVICE_ACCOUNT / "namespace").read_text("ascii").strip()
    config.load_kube_config(config_file=file, context=context, client_configuration=credentials)
    contexts, current = config.list_kube_config_contexts(config_file=file)
    chosen = current if context is None else next(one for one in contexts if one["name"] == context)
    return str(chosen["context"].get("namespace") or "default")


def _has_kubeconfig(config: Any) -> bool:
    places = str(config.KUBE_CONFIG_DEFAULT_LOCATION).split(":")
    return any(Path(place).expanduser().is_file() for place in places if place)


def _teach_kubeconfig(error: Exception, kubeconfig: Path | None, context: str | None) -> str:
    if context is not None and context in str(error):
        return f"--context {quoted(context)}: not in the kubeconfig; `kubectl config get-contexts` lists them"
    place = "KUBECONFIG or ~/.kube/config" if kubeconfig is None else f"--kubeconfig {kubeconfig}"
    return f"{place}: no usable kubeconfig ({quoted(str(error))}); `kubectl cluster-info` should work first"


def _tls(credentials: Any) -> ssl.SSLContext | None:
    if not str(credentials.host).startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=credentials.ssl_ca_cert, cadata=credentials.ca_cert_data)
    if not credentials.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials.cert_file:
        context.load_cert_chain(credentials.cert_file, credentials.key_file)
    return context


class Cluster(AbstractContextManager["Cluster"]):
    """Requests to the API server, until the block ends. All methods raise `ClusterError`."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.namespace = access.namespace
        self._client = httpx.Client(
            base_url=access.host,
            verify=True if access.tls is None else access.tls,
            proxy=access.proxy,
            timeout=TIMEOUT,
        )

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """By the flags of a command. Raises `ConfigError`."""
        return cls(access_of(args.kubeconfig, args.context, args.namespace))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def services(self, name: str | None = None, *, everywhere: bool = False) -> list[Object]:
        """ModelServices: one by its name, or all."""
        if name is not None:
            return [self.request("GET", self._custom(SERVICES, self.namespace, name), about=f"ModelService {name!r}")]
        return self._list(self._custom(SERVICES, None if everywhere else self.namespace))

    def pools(self, namespace: str) -> list[Object]:
        return self._list(self._custom(POOLS, namespace))

    def model_adapters(self, namespace: str) -> list[Object]:
        return self._list(self._custom(ADAPTERS, namespace))

    def model_caches(self, namespace: str) -> list[Object]:
        return self._list(self._custom(CACHES, namespace))

    def pods(self, namespace: str, selector: str) -> list[Object]:
        return self._list(f"api/v1/namespaces/{namespace}/pods", labelSelector=selector)

    def pod(self, name: str) -> Object:
        return self.request("GET", self._pod(name), about=f"pod {name!r}")

    def secret(self, name: str) -> Object:
        return self.request(
            "GET", f"api/v1/namespaces/{self.namespace}/secrets/{quote(name, safe='')}", about=f"Secret {name!r}"
        )

    def patch_service(self, name: str, patch: Object) -> Object:
        about = f"ModelService {name!r}"
        return self.request("PATCH", self._custom(SERVICES, self.namespace, name), patch, about=about)

    def scale_pool(self, name: str, replicas: int) -> Object:
        path = f"{self._custom(POOLS, self.namespace, name)}/scale"
        return self.request("PATCH", path, {"spec": {"replicas": replicas}}, about=f"WorkerPool {name!r}")

    def evict(self, pod: str) -> Object:
        """Ask for the pod to leave, as `kubectl drain` does: refused (429) when a disruption budget forbids it now."""
        body = {"kind": "Eviction", "apiVersion": self._eviction_version(), "metadata": {"name": pod}}
        return self.request("POST", f"{self._pod(pod)}/eviction", body, about=f"pod {pod!r}")

    def request(
        self, method: str, path: str, body: Object | None = None, *, about: str, query: Mapping[str, str] | None = None
    ) -> Object:
        """The answer's JSON."""
        headers = {"Accept": "application/json", **self.access.headers()}
        if body is not None:
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
        content = None if body is None else json.dumps(body)
        extensions = {} if self.access.server_name is None else {"sni_hostname": self.access.server_name}
        try:
            response = self._client.request(
                method, path, content=content, headers=headers, params=query, extensions=extensions
            )
        except httpx.HTTPError as error:
            raise ClusterError(
                f"the API server {self.access.host} does not answer ({error!r}): is this the right context?"
            ) from error
        if response.is_success:
            answer: Object = response.json()
            return answer
        raise ClusterError(_teach(response, path, about), status=response.status_code)

    def _list(self, path: str, **query: str) -> list[Object]:
        found: list[Object] = []
        more: Mapping[str, str] = {}
        while True:
            answer = self.request("GET", path, about=path, query={"limit": str(PAGE), **query, **more})
            found += answer["items"]
            token = answer["metadata"].get("continue")
            if not token or len(found) > MAX_OBJECTS:
                return found
            more = {"continue": token}

    def _eviction_version(self) -> str:
        """`policy/v1`, or what this API server has instead."""
        resources = self.request("GET", "api/v1", about="the core API")["resources"]
        found: Object = next((one for one in resources if one["name"] == "pods/eviction"), {})
        return f"{found.get('group', 'policy')}/{found.get('version', 'v1')}"

    def _pod(self, name: str) -> str:
        return f"api/v1/namespaces/{self.namespace}/pods/{quote(name, safe='')}"

    def _custom(self, plural: str, namespace: str | None, name: str | None = None) -> str:
        place = "" if namespace is None else f"/namespaces/{namespace}"
        return f"{API}{place}/{plural}" + ("" if name is None else f"/{quote(name, safe='')}")


def _teach(response: httpx.Response, path: str, about: str) -> str:
    """A refusal in one sentence, with what to do."""
    message = _message(response)
    match response.status_code:
        case 401:
            return (
                f"the API server rejected the credentials ({message}): log in again, check with `kubectl auth whoami`"
            )
        case 403:
            return (
                f"not permitted: {message}. An administrator can grant it with a Role (docs/kubectl-tandem.md#rights)"
            )
        case 404 if path.startswith(API) and not _is_status(response):
            return "this cluster has no CRD of ModelServices: run `kubectl apply --server-side -f charts/tandem/crds/`"
        case 404:
            return f"{about} does not exist here: {message}"
        case 429:
            return f"the API server is busy: {message}"
    return f"the API server answers {response.status_code}: {message}"


def _is_status(response: httpx.Response) -> bool:
    """Whether the response is about an object; for unknown kinds the API server sends plain text."""
    return bool(response.headers.get("content-type", "").startswith("application/json"))


def _message(response: httpx.Response) -> str:
    try:
        message = response.json().get("message")
    except (ValueError, AttributeError):
        message = None
    return quoted(str(message or response.text or response.reason_phrase))


PROTOCOL = "v4.channel.k8s.io"
DATA, TEXT = 0, 1
CONNECT_S = 5.0
ANSWER_S = 5.0

MAX_AT_ONCE = 4
"""Connections to one pod."""


class PodStream(httpcore.NetworkStream):
    """One connection. Errors are httpcore's, as of any other stream."""

    def __init__(self, socket: Any, port: int) -> None:
        self._socket = socket
        self._port = port
        self._begun: set[int] = set()
        self._received = bytearray()
        self._ended = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """At most `max_bytes`; none at the end."""
        while not self._received and not self._ended:
            self._receive(timeout)
        taken = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        return taken

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._socket.settimeout(timeout)
            self._socket.send_binary(bytes((DATA,)) + buffer)
        except websocket.WebSocketTimeoutException as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except (websocket.WebSocketException, OSError) as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        """Ends it for both sides, without waiting for the other one."""
        self._ended = True
        self._socket.shutdown()

    def get_extra_info(self, info: str) -> Any:
        """Nothing is known of the connection below, but whether it is over."""
        return self._ended if info == "is_readable" else None

    def _receive(self, timeout: float | None) -> None:
        try:
            self._socket.settimeout(timeout)
            opcode, data = self._socket.recv_data()
        except websocket.WebSocketTimeoutException as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except (websocket.WebSocketConnectionClosedException, ConnectionError, ssl.SSLEOFError):
            self._ended = True
            return
        except (websocket.WebSocketException, OSError) as error:
            raise httpcore.ReadError(str(error)) from error
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            self._ended = True
        elif data:
            self._take(data[0], data[1:])

    def _take(self, channel: int, data: bytes) -> None:
        if channel not in self._begun:
            if channel > TEXT or data != struct.pack("<H", self._port):
                raise httpcore.RemoteProtocolError("the API server forwards in a way that is not known here")
            self._begun.add(channel)
        elif channel == TEXT:
            raise httpcore.ReadError(f"the kubelet reports: {quoted(data.decode('utf-8', 'replace'))}")
        else:
            self._received += data


class PodNetwork(httpcore.NetworkBackend):
    """Opens connections to one port of one pod, whatever host and port a request names."""

    def __init__(self, access: Access, namespace: str, pod: str, port: int) -> None:
        self._access = access
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/portforward"
        self._url = f"ws{access.host.removeprefix('http')}{path}?ports={port}"
        self._port = port

    def connect_tcp(
        self,
        host: str,  # noqa: ARG002
        port: int,  # noqa: ARG002
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> PodStream:
        try:
            socket = websocket.create_connection(
                self._url,
                timeout=timeout,
                header=self._access.headers(),
                subprotocols=[PROTOCOL],
                sslopt=_ssl_options(self._access),
                suppress_origin=True,
                **_proxy(self._access.proxy),
            )
        except websocket.WebSocketBadStatusException as error:
            raise httpcore.ConnectError(_refusal(error)) from error
        except websocket.WebSocketTimeoutException as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except (websocket.WebSocketException, OSError) as error:
            raise httpcore.ConnectError(str(error)) from error
        return PodStream(socket, self._port)


class PodTransport(httpx.HTTPTransport):
    """httpx over a `PodNetwork`."""

    def __init__(self, network: PodNetwork) -> None:
        super().__init__(trust_env=False)
        # httpx has no parameter for the network below its pool.
        self._pool = httpcore.ConnectionPool(
            network_backend=network, max_connections=MAX_AT_ONCE, max_keepalive_connections=1
        )


def pod_client(access: Access, pod: Object, port: str, *, headers: dict[str, str] | None = None) -> httpx.Client:
    """A client of the port that a container of `pod` calls `port`. Raises `LookupError` when none does."""
    metadata = pod["metadata"]
    network = PodNetwork(access, metadata["namespace"], metadata["name"], port_number(pod, port))
    return httpx.Client(
        base_url="http://localhost",
        transport=PodTransport(network),
        headers=headers,
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        follow_redirects=False,
    )


def port_number(pod: Object, name: str) -> int:
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port.get("name") == name:
                return int(port["containerPort"])
    raise LookupError(f"pod {pod['metadata']['name']} has no port {name!r}")


def _ssl_options(access: Access) -> dict[str, Any]:
    if access.tls is None:
        return {}
    named = {} if access.server_name is None else {"server_hostname": access.server_name}
    return {"context": access.tls, "check_hostname": access.tls.check_hostname, **named}


def _proxy(url: str | None) -> dict[str, Any]:
    if not url:
        return {}
    parts = urlsplit(url)
    options: dict[str, Any] = {"http_proxy_host": parts.hostname, "http_proxy_port": parts.port}
    if parts.username:
        options["http_proxy_auth"] = (parts.username, parts.password or "")
    return options | {"proxy_type": parts.scheme if parts.scheme.startswith("socks") else "http"}


def _refusal(error: Any) -> str:
    if error.status_code == 403:
        return "no right to port-forward: grant `get` and `create` on `pods/portforward` (docs/kubectl-tandem.md)"
    return f"the API server refuses the port-forward with {error.status_code}"
