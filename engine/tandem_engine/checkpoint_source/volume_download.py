"""A commit of a repository onto a volume (`volume`): resumed after a kill, verified, whole or absent.

    whole on the volume? ─▶ no request     listing ─▶ small files ─▶ names of weights ─▶ room? ─▶ weights ─▶ rename

Files are fetched by ranges, not by huggingface_hub, which begins a file again after each kill. Each error has a
`Reason`, for programs, which says whether another attempt may succeed.
"""

import errno
import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.checkpoint_source.download import first_failure
from tandem_engine.checkpoint_source.examination import require_checkpoint, require_weights
from tandem_engine.checkpoint_source.hub import Hub, Listing, NoAnswerError, list_files, quiet_hub, read_error
from tandem_engine.checkpoint_source.source import ModelSource
from tandem_engine.checkpoint_source.volume import MANIFEST, CommitManifest, VerifiedFile, Volume, VolumeBusyError
from tandem_engine.model.checkpoint_folder import INDEX, SINGLE, read_weight_map, shown

if TYPE_CHECKING:
    from httpx2 import Response

SMALL_PATTERNS = ("*.json", "*.jinja", "*.txt", "tokenizer*")
MAX_SMALL = 1 << 27
"""Bytes of one of these files."""

MAX_FILES = 10_000
MAX_NAME = 200
"""Bytes of a file's name: file systems take 255, and a file under way has a longer one."""

EMPTY = (f"sha256:{hashlib.sha256().hexdigest()}", "git:e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
"""Digests of a file without bytes."""

CHUNK = 1 << 20
ATTEMPTS = 6
"""In a row without a new byte."""

LOCK_S = 60.0
"""For another writer to the volume, which is about to end: a cluster runs one at a time."""

MAX_PAUSE_S = 60.0
CONNECT_S, READ_S = 30.0, 60.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Reason(StrEnum):
    """Why there is no whole commit."""

    AUTH_REFUSED = "HubAuthRefused"
    NOT_FOUND = "SourceNotFound"
    NOT_SERVABLE = "NotServable"
    NO_SPACE = "NoSpace"
    CHECKSUM = "ChecksumMismatch"
    NOT_WRITABLE = "VolumeNotWritable"
    BUSY = "VolumeBusy"
    RATE_LIMITED = "HubRateLimited"
    UNREACHABLE = "HubUnreachable"


PASSING = frozenset({Reason.RATE_LIMITED, Reason.UNREACHABLE, Reason.BUSY})
"""Another attempt may succeed without a change by a person."""


class VolumeDownloadError(ConfigError):
    """The download ended; what has arrived is kept."""

    def __init__(self, reason: Reason, message: str, *, needed: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.needed = needed
        """Bytes that the volume must have, of `NO_SPACE`; 0 where that is not known."""

    @property
    def passing(self) -> bool:
        return self.reason in PASSING


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Of all files together, in bytes."""

    done: int = 0
    total: int = 0
    """0 until it is known."""
    file: str = ""
    """One of those under way."""


class _StoppedError(Exception):
    """The download has failed in another thread."""


class _ChecksumError(Exception):
    """A file has arrived that is not the one of the hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeDownload:
    """What is fetched from where, and whither."""

    hub: Hub
    source: ModelSource
    volume: Volume
    limit: int = 0
    """Bytes that the volume has altogether; 0: as many as its file system says."""
    report: Callable[[Progress], None] = lambda _: None
    """Called from several threads, one at a time."""
    lock_s: float = LOCK_S
    pause: Callable[[float], None] = time.sleep

    def run(self) -> CommitManifest:
        """Return when the commit is whole on the volume.

        Raises:
            VolumeDownloadError: it is not.
        """
        try:
            with self.volume.locked(self.lock_s), quiet_hub():
                return self._run()
        except VolumeBusyError as error:
            raise VolumeDownloadError(Reason.BUSY, str(error)) from error
        except CheckpointError as error:
            raise VolumeDownloadError(Reason.NOT_SERVABLE, f"{self.source.repo}: {error}") from error
        except OSError as error:
            raise self._of_volume(error) from error

    def _run(self) -> CommitManifest:
        if self.source.is_pinned:
            whole = self.volume.whole(self.source.repo, self.source.revision)
            if whole is not None:
                return whole
        listing = self._listing()
        whole = self.volume.whole(self.source.repo, listing.commit)
        if whole is not None:
            return whole
        manifest = _Commit(job=self, listing=listing).fetch()
        # Of a revision that was asked for before, and was never whole.
        self.volume.remove_partial()
        return manifest

    def _listing(self) -> Listing:
        for attempt in range(ATTEMPTS):
            try:
                listing = list_files(self.hub, self.source)
            except ConfigError as error:
                raise self.failure(error.__cause__ or error, error) from error
            except NoAnswerError as error:
                if attempt == ATTEMPTS - 1:
                    raise self.failure(error.__cause__ or error, error) from error
                self.pause(_pause_s(attempt, ""))
            else:
                break
        repo = self.source.repo
        try:
            require_checkpoint(listing.files, where=repo, made_of=listing.base_model)
            require_weights(listing.files, where=repo)
        except ConfigError as error:
            raise VolumeDownloadError(Reason.NOT_SERVABLE, str(error)) from error
        return listing

    def failure(self, cause: BaseException, meaning: Exception) -> VolumeDownloadError:
        """`meaning`: what `read_error` says of `cause`."""
        status = status_of(cause)
        reason = _REASONS.get(status, Reason.UNREACHABLE)
        if isinstance(meaning, NoAnswerError):
            return VolumeDownloadError(reason, f"{self.source.repo}: {self.hub.name} {meaning}")
        return VolumeDownloadError(reason if status else Reason.NOT_SERVABLE, str(meaning))

    def _of_volume(self, error: OSError) -> VolumeDownloadError:
        place = error.filename or self.volume.path
        if error.errno in NO_SPACE:
            return VolumeDownloadError(Reason.NO_SPACE, f"{self.volume.path}: no space is left for {self.source.repo}")
        why = "has no file locks, mount it with flock" if error.errno in NO_LOCKS else "cannot be written"
        text = f"{place} {why}: {error.strerror or error}{self.volume.fix(error)}"
        return VolumeDownloadError(Reason.NOT_WRITABLE, text)


_REASONS = {
    401: Reason.AUTH_REFUSED,
    403: Reason.AUTH_REFUSED,
    404: Reason.NOT_FOUND,
    429: Reason.RATE_LIMITED,
}


def status_of(error: BaseException) -> int:
    """HTTP status of an error of huggingface_hub; 0 without a response."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Commit:
    """One commit under way."""

    job: VolumeDownload
    listing: Listing
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def folder(self) -> Path:
        return self.job.volume.partial(self.listing.commit)

    def fetch(self) -> CommitManifest:
        self.folder.mkdir(parents=True, exist_ok=True)
        small = self._small()
        self._require_sizes(small)
        self._require_room(small)
        self._each(small, _Count(total=0, report=lambda _: None))
        weights = self._weights()
        self._require_sizes(weights)
        names = [*small, *weights]
        done = self.job.volume.verified(self.listing.commit)
        self._require_room(names)
        count = _Count(total=sum(self.listing.files[name] for name in names), report=self.job.report)
        count.add(sum(done[name].size for name in names if name in done), "")
        self._each([name for name in names if name not in done], count)
        files = self.job.volume.verified(self.listing.commit)
        manifest = CommitManifest.of(self.job.source.repo, self.listing.commit, {name: files[name] for name in names})
        self.job.volume.finish(manifest)
        return manifest

    def _small(self) -> list[str]:
        names = [name for name in self.listing.files if self._is_small(name)]
        if len(names) > MAX_FILES:
            raise CheckpointError(f"it has {len(names)} files that are no weights; at most {MAX_FILES} are expected")
        return names

    def _require_sizes(self, names: list[str]) -> None:
        """A listing without sizes reads as one of empty files, which would be whole at once."""
        for name in names:
            if self.listing.files[name] < 1 and self.listing.digests.get(name, "") not in EMPTY:
                raise CheckpointError(f"{self.job.hub.name} lists no size of {name}: set HF_ENDPOINT to another hub")

    def _is_small(self, name: str) -> bool:
        """Configuration and tokenizer: files without a folder, that no pickle is among."""
        if not _is_plain(name) or name.endswith((".safetensors", ".bin", ".pt", ".pth", ".pkl", ".msgpack")):
            return False
        return self.listing.files[name] <= MAX_SMALL and any(fnmatchcase(name, one) for one in SMALL_PATTERNS)

    def _weights(self) -> list[str]:
        """As in the engine, a single file wins over an index."""
        if SINGLE in self.listing.files:
            return [SINGLE]
        shards = sorted(set(read_weight_map(self.folder / INDEX).values()))
        for name in shards[:MAX_FILES]:
            if name not in self.listing.files or not _is_plain(name) or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{INDEX} names {shown(name)}, which the repository lacks or which is no safetensors"
                )
        if len(shards) > MAX_FILES:
            raise CheckpointError(f"{INDEX} names {len(shards)} files; at most {MAX_FILES} are expected")
        return shards

    def _require_room(self, names: list[str]) -> None:
        needed = sum(self.listing.files[name] for name in names)
        limit = self.job.limit
        if limit and needed > limit:
            text = f"{self.job.source.repo} has {needed} bytes, and the volume {limit}"
            raise VolumeDownloadError(Reason.NO_SPACE, text, needed=needed)
        present = sum(self._present(name) for name in names)
        free = shutil.disk_usage(self.folder).free
        if needed - present > free:
            text = f"{self.job.source.repo} needs {needed - present} more bytes, and the volume has {free} free"
            raise VolumeDownloadError(Reason.NO_SPACE, text, needed=needed - present)

    def _present(self, name: str) -> int:
        for path in (self.folder / name, self._part(name)):
            if path.is_file():
                return min(path.stat().st_size, self.listing.files[name])
        return 0

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}.part"

    def _each(self, names: list[str], count: "_Count") -> None:
        done = self.job.volume.verified(self.listing.commit)
        failure = first_failure([name for name in names if name not in done], lambda name: self._fetch(name, count))
        if failure is None:
            return
        self.stop.set()
        name, error = failure
        if isinstance(error, VolumeDownloadError):
            raise error
        if isinstance(error, OSError) and error.errno in NO_SPACE and count.total:
            text = f"{self.job.volume.path}: no space is left for {self.job.source.repo}"
            raise VolumeDownloadError(Reason.NO_SPACE, text, needed=count.total - count.done) from error
        if isinstance(error, OSError) and error.errno is not None and status_of(error) == 0:
            raise error
        if isinstance(error, _ChecksumError):
            raise VolumeDownloadError(Reason.CHECKSUM, f"{self.job.source.repo}: {error}") from error
        meaning = read_error(error, self.job.hub, self.job.source)
        if isinstance(meaning, NoAnswerError):
            meaning = NoAnswerError(f"{meaning} while {name} was downloaded")
        raise self.job.failure(error, meaning) from error

    def _fetch(self, name: str, count: "_Count") -> None:
        """One file. A wrong one is fetched once more, from its first byte."""
        for last in (False, True):
            try:
                file = self._fetch_once(name, count)
            except _ChecksumError:
                count.add(-self._part(name).stat().st_size, name)
                self._part(name).unlink()
                if last:
                    raise
            else:
                with count.lock:
                    self.job.volume.record(self.listing.commit, file)
                return

    def _fetch_once(self, name: str, count: "_Count") -> VerifiedFile:
        expected, part = self.listing.digests.get(name, ""), self._part(name)
        size = self.listing.files[name]
        if (self.folder / name).exists():
            # Interrupted before it was recorded: it is compared again, and not fetched.
            (self.folder / name).replace(part)
        with part.open("a+b") as file:
            digest = _Digest.of(file, size, expected)
            count.add(digest.size, name)
            self._stream(name, file, digest, count)
            file.flush()
            os.fsync(file.fileno())
        if digest.size != size or expected not in ("", digest.shown):
            found = f"{digest.size} bytes with {digest.shown}"
            raise _ChecksumError(f"{name} has {found}, and according to the hub {size} with {expected}")
        part.replace(self.folder / name)
        return VerifiedFile(name=name, size=size, sha256=digest.whole.hexdigest())

    def _stream(self, name: str, file: BinaryIO, digest: "_Digest", count: "_Count") -> None:
        """Append what is missing; a connection that ends early is continued."""
        from httpx2 import HTTPError
        from huggingface_hub.errors import HfHubHTTPError

        failures, most, size = 0, digest.size, self.listing.files[name]
        while digest.size < size:
            try:
                self._append(name, file, digest, count)
            except (HTTPError, HfHubHTTPError) as error:
                # A server without ranges begins again each time: fewer bytes are no progress.
                failures = 1 if digest.size > most else failures + 1
                most = max(most, digest.size)
                if not _may_pass(error) or failures >= ATTEMPTS:
                    raise
                self.job.pause(_pause_s(failures - 1, _retry_after(error)))

    def _append(self, name: str, file: BinaryIO, digest: "_Digest", count: "_Count") -> None:
        from httpx2 import RemoteProtocolError
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

        job, start = self.job, digest.size
        url = hf_hub_url(job.source.repo, name, revision=self.listing.commit, endpoint=job.hub.endpoint)
        # Compressed content has no ranges.
        headers = {**_authorization(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", url, headers=headers, timeout=_timeout()) as response:
            hf_raise_for_status(response)
            if start and not _continues(response, start):
                # A server without ranges begins again.
                count.add(-start, name)
                file.truncate(0)
                digest.restart()
            for chunk in response.iter_bytes():
                if self.stop.is_set():
                    raise _StoppedError
                kept = chunk[: self.listing.files[name] - digest.size]
                file.write(kept)
                digest.update(kept)
                count.add(len(kept), name)
                if len(kept) < len(chunk):
                    raise _ChecksumError(f"{name} has more than the {digest.size} bytes that the hub says")
        if digest.size < self.listing.files[name]:
            raise RemoteProtocolError(f"{name} ended after {digest.size} bytes")


def _is_plain(name: str) -> bool:
    """No folder, no hidden file, nothing that a terminal would obey, and no name that the volume uses itself."""
    if name == MANIFEST or name.startswith(".") or name.endswith(".part"):
        return False
    return Path(name).name == name and name.isprintable() and len(name.encode()) <= MAX_NAME


def _authorization() -> dict[str, str]:
    """For the hub; the client leaves it out of requests that the hub redirects to another host."""
    from huggingface_hub import get_token

    token = get_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _continues(response: "Response", start: int) -> bool:
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _timeout() -> Any:
    from httpx2 import Timeout

    return Timeout(READ_S, connect=CONNECT_S)


def _may_pass(error: Exception) -> bool:
    status = status_of(error)
    return status in (0, 408, 429) or status >= 500


def _retry_after(error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""


def _pause_s(failures: int, retry_after: str) -> float:
    """As long as the hub asks for, else longer each time; never in step with other clients."""
    asked = float(retry_after) if retry_after.isdecimal() else 2.0**failures
    return min(MAX_PAUSE_S, asked) * random.uniform(1.0, 1.25)


@dataclass(kw_only=True, slots=True)
class _Digest:
    """Of the bytes so far, in the form that the hub has it in."""

    total: int
    """Bytes of the whole file, which are a part of git's digest."""
    as_blob: bool
    size: int = 0
    whole: Any = field(default_factory=hashlib.sha256)
    blob: Any = None

    @classmethod
    def of(cls, file: BinaryIO, total: int, expected: str) -> "_Digest":
        """Of what `file` has; it is left at its end."""
        digest = cls(total=total, as_blob=expected.startswith("git:"))
        digest.restart()
        file.seek(0)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        return digest

    def restart(self) -> None:
        self.size, self.whole = 0, hashlib.sha256()
        if self.as_blob:
            self.blob = hashlib.sha1(b"blob %d\0" % self.total, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self.whole.update(chunk)
        if self.as_blob:
            self.blob.update(chunk)

    @property
    def shown(self) -> str:
        """As `Listing.digests` has it."""
        return f"git:{self.blob.hexdigest()}" if self.as_blob else f"sha256:{self.whole.hexdigest()}"


@dataclass(kw_only=True, slots=True)
class _Count:
    """Bytes of all files."""

    total: int
    report: Callable[[Progress], None]
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, size: int, name: str) -> None:
        """`size` is negative when a file begins again."""
        with self.lock:
            self.done += size
            self.report(Progress(done=min(self.done, self.total), total=self.total, file=name))


def prune(volume: Volume, keep: list[str]) -> list[str]:
    """Remove all commits but those of `keep`; names of what was removed.

    Raises:
        VolumeDownloadError: the volume is busy, or cannot be written.
    """
    try:
        with volume.locked(LOCK_S):
            return volume.remove_others(keep)
    except VolumeBusyError as error:
        raise VolumeDownloadError(Reason.BUSY, str(error)) from error
    except OSError as error:
        text = f"{error.filename or volume.path} cannot be removed: {error.strerror or error}"
        raise VolumeDownloadError(Reason.NOT_WRITABLE, text) from error
