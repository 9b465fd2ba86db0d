"""An OpenAI-compatible server that streams given answers, for clients in other processes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(kw_only=True)
class ChatServer:
    """What it answers, and what arrived."""

    url: str = ""
    answers: list[list[dict[str, str]]] = field(default_factory=list)
    """Deltas of each; the last one is repeated."""
    endless: bool = False
    """Answers continue until the client closes the connection."""
    requests: list[dict] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    """A client has closed the connection of an endless answer."""


@contextmanager
def chat_server(*answers: list[dict[str, str]], endless: bool = False) -> Iterator[ChatServer]:
    state = ChatServer(answers=list(answers), endless=endless)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            models = self.path == "/v1/models"
            self._reply(200 if models else 404, {"data": [{"id": "first"}, {"id": "second"}]} if models else {})

        def _reply(self, status: int, document: dict) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            state.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            deltas = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            for delta in deltas:
                self._event(delta)
            with suppress(BrokenPipeError, ConnectionResetError):
                while state.endless:
                    self._event({"content": "more "})
                    state.closed.wait(0.01)
                self.wfile.write(b"data: [DONE]\n\n")
                return
            state.closed.set()

        def _event(self, delta: dict[str, str]) -> None:
            chunk = {"id": "chatcmpl-1", "choices": [{"delta": delta}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield state
        finally:
            state.endless = False
            server.shutdown()
            thread.join()
