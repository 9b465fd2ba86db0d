"""Keys from a file or a mounted Secret, followed while they change.

1. At start the keys must be good: a gateway that cannot tell who may use it does not start.
2. They are followed (`gateway.follower`). Kubernetes swaps a symbolic link (`..data`), so the files of one version are
   read through the folder that it points to, never a mixture of two.
3. A change that is no good leaves the keys as they were; log and metric say so until it is mended.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.errors import ConfigError
from tandem_engine.logs import quoted
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.key_file import MAX_FILE_BYTES, KeyFileError, KeyRing, parse_keys
from tandem_services.gateway.follower import Follower, Signature, signature_of

logger = logging.getLogger(__name__)

SUFFIX = ".json"
MAX_FILES = 256


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
    try:
        return signature_of(key_files(path))
    except (OSError, KeyFileError):
        return ()


@dataclass(kw_only=True, slots=True)
class KeyWatch:
    """The valid keys at any time. `start` before anything else."""

    path: Path
    metrics: AccessMetrics
    _follower: Follower[KeyRing] = field(init=False)

    def __post_init__(self) -> None:
        self._follower = Follower(
            value=KeyRing(()),
            signature=lambda: _signature(self.path),
            read=lambda: read_keys(self.path),
            take=self._take,
            refused=self._refused,
            mended=lambda: self.metrics.keys_loaded(len(self.ring.tenants)),
            faults=(KeyFileError,),
        )

    @property
    def ring(self) -> KeyRing:
        return self._follower.value

    def start(self) -> None:
        """Raises `ConfigError`."""
        self._follower.seen = _signature(self.path)
        try:
            self._follower.value = read_keys(self.path)
        except KeyFileError as error:
            raise ConfigError(f"--api-keys {error}") from error
        self.metrics.keys_loaded(len(self.ring.tenants))
        logger.info("API keys are required", extra={"fields": {"tenants": len(self.ring.tenants)}})

    async def run(self) -> None:
        """Follow changes, for ever."""
        await self._follower.run(logger, what="API keys")

    async def poll(self) -> None:
        """Take over what has changed."""
        await self._follower.poll()

    async def _take(self, ring: KeyRing) -> None:
        self.metrics.keys_loaded(len(ring.tenants))
        logger.info("API keys changed", extra={"fields": {"tenants": len(ring.tenants)}})

    def _refused(self, complaint: str) -> None:
        self.metrics.keys_refused()
        logger.error("changed API keys are invalid, keeping the previous ones: %s", quoted(complaint))
