"""`tandem pull --into`: a commit onto a volume, with its progress over HTTP and its result in a file.

What a Job of a ModelCache runs (docs/model-cache.md). Its pod has no account of the cluster: the operator reads the
progress from the port, and the result from the termination message, which is the file.

    0  the commit is whole     2  it cannot be until a person changes something     3  another attempt may succeed
"""

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_engine.base.addresses import EVERY_ADDRESS
from tandem_engine.base.errors import ConfigError
from tandem_services.cli.models.download_view import Lines
from tandem_services.common.sockets import listen

if TYPE_CHECKING:
    from tandem_engine.checkpoint_source.source import ModelSource
    from tandem_engine.checkpoint_source.volume import CommitManifest
    from tandem_engine.checkpoint_source.volume_download import Progress, VolumeDownloadError

PASSING_STATUS = 3
MAX_MESSAGE = 2048
"""Characters of an error in the result: a termination message has at most 4096 bytes."""

RATE_S = 30.0
"""Of the average that is shown as rate."""

SAMPLE_S = 1.0
CONNECTION_S = 5.0
PATH = "/progress"


def pull_into(args: argparse.Namespace, source: "ModelSource") -> int:
    """The command. Raises `ConfigError` for what a person has to change, after the result is written."""
    from tandem_engine.checkpoint_source.hub import Hub
    from tandem_engine.checkpoint_source.volume import Volume
    from tandem_engine.checkpoint_source.volume_download import VolumeDownload, VolumeDownloadError

    view = _View(lines=Lines(source.repo, sys.stderr))
    volume = Volume(path=Path(args.into).absolute())
    download = VolumeDownload(
        hub=Hub.of_environment(), source=source, volume=volume, limit=args.max_bytes or 0, report=view.show
    )
    with _served(view, args.progress_port):
        try:
            manifest = download.run()
            removed = _prune(volume, args, manifest)
        except VolumeDownloadError as error:
            _write(args.result, _failure(error))
            if not error.passing:
                raise
            print(f"tandem: error: {error}", file=sys.stderr)
            return PASSING_STATUS
    _write(args.result, _success(manifest, removed))
    print(f"{source.repo}@{manifest.commit} is in {volume.path / manifest.commit}")
    return 0


def _prune(volume: Any, args: argparse.Namespace, manifest: "CommitManifest") -> list[str]:
    from tandem_engine.checkpoint_source.volume_download import prune

    return prune(volume, [manifest.commit, *args.keep]) if args.prune else []


def _success(manifest: "CommitManifest", removed: list[str]) -> dict[str, Any]:
    return {
        "commit": manifest.commit,
        "size": manifest.size,
        "files": len(manifest.files),
        "fingerprint": manifest.fingerprint,
        "removed": len(removed),
    }


def _failure(error: "VolumeDownloadError") -> dict[str, Any]:
    return {"reason": error.reason.value, "message": str(error)[:MAX_MESSAGE], "needed": error.needed}


def _write(file: str | None, result: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        Path(file).write_text(json.dumps(result, ensure_ascii=True))
    except OSError as error:
        raise ConfigError(f"--result {file}: {error.strerror}") from error


@dataclass(kw_only=True, slots=True)
class _View:
    """The progress as it is now, and lines of it now and then."""

    lines: Lines
    _now: "Progress | None" = None
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=int(RATE_S / SAMPLE_S) + 1))

    def show(self, progress: "Progress") -> None:
        """Called by one thread at a time."""
        self._now = progress
        now = time.monotonic()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, progress.done))
        if progress.total:
            self.lines.progress(progress.done, progress.total)

    def document(self) -> bytes:
        """JSON; rate in bytes per second."""
        now = self._now
        if now is None:
            return json.dumps({"done": 0, "total": 0, "file": "", "rate": 0}).encode()
        first, at = self._samples[0], time.monotonic()
        rate = max(0, now.done - first[1]) / max(at - first[0], SAMPLE_S)
        return json.dumps({"done": now.done, "total": now.total, "file": now.file, "rate": int(rate)}).encode()


@contextmanager
def _served(view: _View, port: int | None) -> Iterator[None]:
    """While the block lasts. Raises `StartupError` where the port is taken."""
    if port is None:
        yield
        return
    listener = listen(EVERY_ADDRESS, port, flags="--progress-port")

    class Handler(_Handler):
        shown = view

    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="progress", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """`GET /progress`, and nothing else."""

    shown: _View
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        known = self.path == PATH
        body = self.shown.document() if known else b""
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its own name
        """One line for each poll would hide the others."""
