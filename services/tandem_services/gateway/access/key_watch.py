"""Keys from a file or a mounted Secret, followed while they change.

1. At start the keys must be good: a gateway that cannot tell who may use it does not start.
2. Once a second names and times are looked at; what has changed is read again. Kubernetes swaps a symbolic link
   (`..data`), so the files of one version are read through the folder that it points to, never a mixture of two.
3. A change that is no good leaves the keys as they were; log and metric say so until it is mended.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.errors import ConfigError
from tandem_engine.logs import quoted
from tandem_services.common.tasks import for_ever
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.key_file import MAX_FILE_BYTES, KeyFileError, KeyRing, parse_keys

logger = logging.getLogger(__name__)

POLL_S = 1.0
SUFFIX = ".json"
MAX_FILES = 256

Signature = tuple[tuple[str, int, int, int], ...]


def key_files(path: Path) -> list[Path]:
    """The file itself, or the `.json` files of a folder. Raises `KeyFileError` when there are none."""
    if not path.is_dir():
        return [path]
    version = path / "..data"
    folder = version.resolve() if version.is_symlink() else path
    files = sorted(file for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith(".") and file.is_file())
    if not files:
        raise KeyFileError(f"{path}: no {SUFFIX} file in this folder")
    if len(files) > MAX_FILES:
        raise KeyFileError(f"{path}: {len(files)} files, the most are {MAX_FILES}")
    return files


def read_keys(path: Path) -> KeyRing:
    """Raises `KeyFileError`."""
    contents = {}
    for file in key_files(path):
        try:
            with file.open("rb") as opened:
                contents[file.name] = opened.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeyFileError(f"{file}: {error.strerror}") from error
    return parse_keys(contents)


def _signature(path: Path) -> Signature:
    """Differs when the keys may have changed."""
    try:
        stats = [(file, file.stat()) for file in key_files(path)]
    except (OSError, KeyFileError):
        return ()
    return tuple((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


@dataclass(kw_only=True, slots=True)
class KeyWatch:
    """The valid keys at any time. `start` before anything else."""

    path: Path
    metrics: AccessMetrics
    ring: KeyRing = field(default_factory=lambda: KeyRing(()))
    _seen: Signature = ()
    _complaint: str = ""

    def start(self) -> None:
        """Raises `ConfigError`."""
        self._seen = _signature(self.path)
        try:
            self.ring = read_keys(self.path)
        except KeyFileError as error:
            raise ConfigError(f"--api-keys {error}") from error
        self.metrics.keys_loaded(len(self.ring.tenants))
        logger.info("API keys are required", extra={"fields": {"tenants": len(self.ring.tenants)}})

    async def run(self) -> None:
        """Follow changes, for ever."""
        # Keys that are never followed again would keep what was taken away.
        complaint = "looking for changed API keys failed"
        await for_ever(self.poll, every_s=POLL_S, logger=logger, complaint=complaint)

    async def poll(self) -> None:
        """Take over what has changed."""
        signature = await asyncio.to_thread(_signature, self.path)
        if signature == self._seen and not self._complaint:
            return
        try:
            ring = await asyncio.to_thread(read_keys, self.path)
        except KeyFileError as error:
            self._refuse(str(error))
            return
        self._seen = signature
        if ring != self.ring or self._complaint:
            self._take(ring)

    def _take(self, ring: KeyRing) -> None:
        self.ring, self._complaint = ring, ""
        self.metrics.keys_loaded(len(ring.tenants))
        logger.info("API keys changed", extra={"fields": {"tenants": len(ring.tenants)}})

    def _refuse(self, complaint: str) -> None:
        if complaint == self._complaint:
            return
        self._complaint = complaint
        self.metrics.keys_refused()
        logger.error("changed API keys are not used, the former are kept: %s", quoted(complaint))
