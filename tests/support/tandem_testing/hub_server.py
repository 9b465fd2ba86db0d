"""A Hugging Face hub on loopback: revision information, and HEAD and GET of files, with ranges.

hub = HubServer()
hub.add("org/mini", folder)          its files, at a commit that `main` names
hub.repos["org/mini"].status = 500   how it fails: see `HubRepo`
"""

import hashlib
import json
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass(kw_only=True)
class HubRepo:
    """One repository, and what is wrong with it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    card: dict[str, object] = field(default_factory=dict)
    token: str = ""
    """Gated: files are for this one alone."""
    moved_to: str = ""
    status: int = 0
    """Of every response, if not 0."""
    held: threading.Event | None = None
    """Until it is set there is no response about a revision."""
    cut: frozenset[str] = frozenset()
    """Files that end early: after half in the first response, at once in later ones."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Announced instead of the true ones."""
    limited: int = 0
    """Requests for files that are answered with 429 before others are served."""
    wrong: dict[str, int] = field(default_factory=dict)
    """Files of which so many more responses have another last byte."""
    paced: dict[str, float] = field(default_factory=dict)
    """Files that are sent in small parts, with so many seconds between two."""

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        """Let `revision` be a new commit with these files; returns its id."""
        commit = hashlib.sha1(repr((sorted(files), len(self.commits))).encode()).hexdigest()
        self.commits[commit] = files
        self.refs[revision] = commit
        return commit


class HubServer:
    """Serves until `close`, at an address of this machine."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.repos: dict[str, HubRepo] = {}
        self.requests: list[str] = []
        """Method and path of each."""
        self.gets: Counter[str] = Counter()
        """By path of a file."""
        self.starts: defaultdict[str, list[int]] = defaultdict(list)
        """First bytes of the ranges that were sent, by name of a file."""
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._server = _Server((host, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def add(self, repo: str, folder: Path) -> HubRepo:
        """A repository with the files of a checkpoint in `folder`."""
        self.repos[repo] = HubRepo()
        self.repos[repo].commit({path.name: path.read_bytes() for path in folder.iterdir()})
        return self.repos[repo]

    def files_sent(self) -> list[str]:
        """Names of those that were fetched."""
        return sorted(path.rpartition("/")[2] for path in self.gets)

    def close(self) -> None:
        for repo in self.repos.values():
            if repo.held is not None:
                repo.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def hub_server(host: str = "127.0.0.1") -> Iterator[HubServer]:
    """A hub for the duration of the block."""
    hub = HubServer(host)
    try:
        yield hub
    finally:
        hub.close()


PART = 1 << 16
"""Bytes of a part of a file that is paced."""


def _sibling(name: str, data: bytes, size: int) -> dict[str, object]:
    """A file as a listing has it: weights are large files, with their SHA-256."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": blob}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"size": size, "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    return entry


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that does not wait for the end of a response is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: HubServer

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Tests read `requests`."""

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server_of.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        about = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if about else parts[:2])
        repo = self.server_of.repos.get(name)
        if repo is None:
            self._fail(401, "RepoNotFound")
        elif repo.status:
            self._fail(repo.status, "")
        elif about:
            self._revision(name, repo, "/".join(parts[5:]))
        else:
            self._file(repo, parts[3], "/".join(parts[4:]))

    def _revision(self, name: str, repo: HubRepo, revision: str) -> None:
        if repo.held is not None:
            repo.held.wait()
        if repo.moved_to:
            self.send_response(307)
            self.send_header("Location", f"/api/models/{repo.moved_to}/revision/{revision}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        commit = revision if revision in repo.commits else repo.refs.get(revision)
        if commit is None:
            self._fail(404, "RevisionNotFound")
            return
        files = [_sibling(file, data, repo.sizes.get(file, len(data))) for file, data in repo.commits[commit].items()]
        self._send(
            json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": files, "cardData": repo.card}).encode()
        )

    def _file(self, repo: HubRepo, commit: str, file: str) -> None:
        if repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}":
            self._fail(403, "GatedRepo")
        elif commit not in repo.commits or file not in repo.commits[commit]:
            self._fail(404, "EntryNotFound")
        elif repo.limited > 0:
            repo.limited -= 1
            self._fail(429, "", {"Retry-After": "1"})
        else:
            data = repo.commits[commit][file]
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            if file in repo.sizes:
                headers["X-Linked-Size"] = str(repo.sizes[file])
            if self.command == "GET" and repo.wrong.get(file, 0) > 0:
                repo.wrong[file] -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            kept = len(data) if file not in repo.cut else self._kept(data)
            self._send(data, headers, keep=kept, pause_s=repo.paced.get(file, 0.0))

    def _kept(self, data: bytes) -> int:
        return 0 if self.server_of.gets[self.path] else len(data) // 2

    def _send(
        self, data: bytes, headers: dict[str, str] | None = None, keep: int | None = None, pause_s: float = 0.0
    ) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        kept = len(data) if keep is None else keep
        if headers:
            self.server_of.gets[self.path] += 1
            self.server_of.starts[self.path.rpartition("/")[2]].append(start)
        self._write(data[start : max(kept, start)] if kept < len(data) else data[start:], pause_s)
        if kept < len(data):
            self.close_connection = True

    def _write(self, data: bytes, pause_s: float) -> None:
        part = PART if pause_s else max(1, len(data))
        for start in range(0, len(data), part):
            self.wfile.write(data[start : start + part])
            time.sleep(pause_s)

    def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
