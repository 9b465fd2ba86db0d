"""Connections to ports of pods, through the API server: what `kubectl port-forward` does, without a port here.

    httpx ─▶ PodStream ─▶ WebSocket to the API server ─▶ kubelet ─▶ 127.0.0.1:PORT within the pod

One connection is one WebSocket (`v4.channel.k8s.io`). Each message begins with a channel: 0 carries bytes both ways,
1 what the kubelet has to complain of; the first message of each is the port's number. There is no thread and no
listening port, so that others on this machine cannot use the connection. It arrives from the pod's own loopback, from
where workers take orders, and no NetworkPolicy is in its way.

The client library has a port-forward, too. It copies in a thread that waits without a bound and that no error ends.
"""

import ssl
import struct
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, urlsplit

import httpcore
import httpx
import websocket

from tandem_engine.logs import quoted
from tandem_services.cli.k8s.cluster import Access, Object

PROTOCOL = "v4.channel.k8s.io"
DATA, COMPLAINT = 0, 1
CONNECT_S = 5.0
ANSWER_S = 5.0
MOST_AT_ONCE = 4
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
            if channel > COMPLAINT or data != struct.pack("<H", self._port):
                raise httpcore.RemoteProtocolError("the API server forwards in a way that is not known here")
            self._begun.add(channel)
        elif channel == COMPLAINT:
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
            network_backend=network, max_connections=MOST_AT_ONCE, max_keepalive_connections=1
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
