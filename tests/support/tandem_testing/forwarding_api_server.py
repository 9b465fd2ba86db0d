"""A part of an API server: it answers `GET` with objects at hand, and forwards ports of pods to ports of this machine.

It speaks the WebSocket protocol `v4.channel.k8s.io` as kubelets do: the first message of each channel is the port's
number, then channel 0 carries bytes and channel 1 the kubelet's errors.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

Object = dict[str, Any]

PROTOCOL = "v4.channel.k8s.io"
FORWARD = re.compile(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/portforward")
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
TEXT, BINARY, CLOSE = 1, 2, 8
SILENT = -1
"""In place of a port: no byte ever comes."""


@dataclass(kw_only=True)
class ForwardingApiServer:
    """Serves from entering the block to its end."""

    objects: dict[str, Any] = field(default_factory=dict)
    """By path: what `GET` answers; a list of objects is one of Kubernetes' lists, an int is that refusal."""
    ports: dict[tuple[str, int], int] = field(default_factory=dict)
    """(pod, port) → port of this machine."""
    error_message: str = ""
    """The kubelet's error instead of forwarding."""
    refusal: int = 0
    """Status in place of an upgrade."""
    writes: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, path and body of everything that was no `GET`."""
    selectors: list[str] = field(default_factory=list)
    open: int = 0
    """Forwarded connections."""
    _server: ThreadingHTTPServer = field(init=False)

    def __enter__(self) -> Self:
        api = self

        class Handler(_Handler):
            server_state = api

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, folder: Path, *, namespace: str = "models") -> Path:
        """A file that leads here."""
        path = folder / "kubeconfig"
        context = {"cluster": "here", "user": "me", "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
            "contexts": [{"name": "test", "context": context}],
        }
        path.write_text(json.dumps(content))
        return path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: ForwardingApiServer

    def log_message(self, *_: object) -> None:
        """Tests have no use for it."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query)
        assert self.headers["authorization"] == "Bearer secret"
        forward = FORWARD.fullmatch(path)
        if forward is not None:
            self._forward(forward[2], int(query["ports"][0]))
            return
        self.server_state.selectors += query.get("labelSelector", [])
        found = self.server_state.objects.get(path, 404)
        if isinstance(found, int):
            self._say(found, _status(found, path))
        elif isinstance(found, list):
            selector = query.get("labelSelector", [""])[0]
            self._say(
                200, {"kind": "List", "metadata": {}, "items": [one for one in found if _selected(one, selector)]}
            )
        else:
            self._say(200, found)

    def do_POST(self) -> None:
        self._write()

    def do_PATCH(self) -> None:
        self._write()

    def _write(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = urlsplit(self.path).path
        self.server_state.writes.append((self.command, path, body))
        refused = self.server_state.objects.get(f"{self.command} {path}", 0)
        self._say(refused or 200, _status(refused, path) if refused else body)

    def _say(self, status: int, document: Object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _forward(self, pod: str, port: int) -> None:
        api = self.server_state
        self.close_connection = True
        if api.refusal:
            self._say(api.refusal, _status(api.refusal, pod))
            return
        assert PROTOCOL in self.headers["sec-websocket-protocol"]
        accept = base64.b64encode(hashlib.sha1(self.headers["sec-websocket-key"].encode() + GUID).digest()).decode()
        self.send_response(101)
        for name, value in (
            ("upgrade", "websocket"),
            ("connection", "Upgrade"),
            ("sec-websocket-accept", accept),
            ("sec-websocket-protocol", PROTOCOL),
        ):
            self.send_header(name, value)
        self.end_headers()
        api.open += 1
        try:
            _relay(_Frames(self.connection), port, api.ports.get((pod, port), 0), api.error_message)
        finally:
            api.open -= 1


@dataclass
class _Frames:
    """A server's end of a WebSocket."""

    connection: socket.socket
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, opcode: int, data: bytes) -> None:
        size = len(data)
        head = struct.pack("!BB", 0x80 | opcode, size) if size < 126 else struct.pack("!BBQ", 0x80 | opcode, 127, size)
        with self._lock:
            self.connection.sendall(head + data)

    def receive(self) -> tuple[int, bytes]:
        """Raises `ConnectionError` at the end."""
        opcode, size = self._exactly(2)
        opcode, size = opcode & 0x0F, size & 0x7F
        if size == 126:
            [size] = struct.unpack("!H", self._exactly(2))
        elif size == 127:
            [size] = struct.unpack("!Q", self._exactly(8))
        mask = self._exactly(4) * (size // 4 + 1)
        masked = int.from_bytes(self._exactly(size), "big") ^ int.from_bytes(mask[:size], "big")
        return opcode, masked.to_bytes(size, "big")

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self.connection.recv(size - len(data))
            if not more:
                raise ConnectionError("the client has gone")
            data += more
        return bytes(data)


def _relay(frames: _Frames, port: int, target: int, error_message: str) -> None:
    for channel in (0, 1):
        frames.send(BINARY, bytes((channel,)) + struct.pack("<H", port))
    if error_message or target == 0:
        frames.send(BINARY, b"\x01" + (error_message or f"nobody listens on {port}").encode())
        frames.send(CLOSE, b"")
        return
    if target == SILENT:
        _until_closed(frames, None)
        return
    with socket.create_connection(("127.0.0.1", target)) as pod:
        back = threading.Thread(target=_answers, args=(frames, pod), daemon=True)
        back.start()
        _until_closed(frames, pod)
        pod.shutdown(socket.SHUT_RDWR)
        back.join(10)


def _answers(frames: _Frames, pod: socket.socket) -> None:
    """What the pod says, and the end of it."""
    try:
        while data := pod.recv(1 << 16):
            frames.send(BINARY, b"\x00" + data)
        frames.send(CLOSE, b"")
    except OSError:
        pass  # The client has gone.


def _until_closed(frames: _Frames, pod: socket.socket | None) -> None:
    try:
        while True:
            opcode, data = frames.receive()
            if opcode == CLOSE:
                return
            if pod is not None and opcode in (TEXT, BINARY):
                assert data[0] == 0, "clients write to the data channel alone"
                pod.sendall(data[1:])
    except OSError:
        return


def _selected(one: Object, selector: str) -> bool:
    """By labels that are there, and labels that have a value."""
    labels = one["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in selector.split(",") if part]
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in wanted)


def _status(code: int, path: str) -> Object:
    """As an API server refuses."""
    reasons = {403: "Forbidden", 404: "NotFound", 429: "TooManyRequests", 422: "Invalid", 401: "Unauthorized"}
    message = f"{path} {reasons.get(code, 'Failure')}"
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reasons.get(code, ""), "message": message}
