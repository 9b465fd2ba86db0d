"""API keys: their creation, the key file that lists their digests, and its reload after changes (docs/limits.md).

    {"keys": [{"name": "search", "sha256": ["9f86…"], "requests_per_minute": 600, …}, …]}

A key has 256 random bits, so its SHA-256 cannot be inverted and needs no slow hash. Several files, as in a mounted
Kubernetes Secret, are read as one.

    KeyFile    one file as decoded JSON
    KeyRing    all entries, by digest
    KeyWatch   reloads them (`common.file_watcher`)

1. The keys must be valid at start: a gateway that cannot authenticate clients does not start.
2. Kubernetes replaces a symbolic link (`..data`) when a Secret changes. All files of one version are read through the
   directory that it points to, never a mixture of two versions.
3. An invalid change leaves the previous keys active. The log and a metric report it until it is corrected.
"""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from secrets import compare_digest

import msgspec

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.errors import ServiceError
from tandem_services.common.file_watcher import Follower, Signature, signature_of
from tandem_services.gateway.access.tenants import AccessMetrics, Tenant

PREFIX = "tdm-"
"""Identifies the text as a key for secret scanners and people."""

MAX_KEY_CHARACTERS = 512


def new_key() -> str:
    """A new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """SHA-256 in hex: what stands in the key file."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


MAX_FILE_BYTES = 4 << 20
MAX_KEYS = 4_096


class KeyFileError(ServiceError):
    """The message names the file, the entry and the fault, and never a key."""

    code = "key_file_error"


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    keys: tuple[Tenant, ...]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All valid keys."""

    tenants: tuple[Tenant, ...]

    def find(self, key: str) -> Tenant | None:
        """Whose key this is. Takes the same time whatever the key: all digests are compared, each in constant time."""
        digest, holder = digest_of(key), None
        for tenant in self.tenants:
            for known in tenant.sha256:
                if compare_digest(known, digest):
                    holder = tenant
        return holder


def parse_keys(files: Mapping[str, bytes]) -> KeyRing:
    """`files`: contents by name. Raises `KeyFileError`."""
    tenants: list[Tenant] = []
    for name, content in files.items():
        tenants += _parse(name, content).keys
    _check(tenants, ", ".join(files))
    return KeyRing(tuple(tenants))


def _parse(name: str, content: bytes) -> KeyFile:
    if len(content) > MAX_FILE_BYTES:
        raise KeyFileError(f"{name}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.json.decode(content, type=KeyFile)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{name}: {quoted(str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{name}: not valid JSON: {quoted(str(error))}") from error


def _check(tenants: list[Tenant], where: str) -> None:
    names: set[str] = set()
    digests: set[str] = set()
    for tenant in tenants:
        if tenant.name in names:
            raise KeyFileError(f"{where}: two entries have the name {tenant.name}; put both digests into one entry")
        if not tenant.sha256:
            raise KeyFileError(f"{where}: {tenant.name} has no digest in sha256; `tandem keys hash` makes one")
        for digest in tenant.sha256:
            if digest in digests:
                raise KeyFileError(f"{where}: {tenant.name} has a digest twice, or shares a key with another entry")
            digests.add(digest)
        names.add(tenant.name)
    if not tenants:
        raise KeyFileError(f"{where}: no keys; `tandem keys create NAME` makes an entry")
    if len(digests) > MAX_KEYS:
        raise KeyFileError(f"{where}: {len(digests)} keys, the most are {MAX_KEYS}")


def deployment_secret(keys: KeyPair | None, cluster: str) -> bytes:
    """16 bytes. Without a key file (loopback alone) they say only which cluster it is."""
    secret = b"" if keys is None else keys.secret
    return blake2b(cluster.encode(), key=secret, digest_size=16).digest()


def cache_secret(secret: bytes) -> bytes:
    """What tenants' cache salts are keyed with."""
    return blake2b(b"prefix cache", key=secret, digest_size=32).digest()


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
        """Follow changes until canceled."""
        await self._follower.run(logger, what="API keys")

    async def poll(self) -> None:
        """Take over what has changed."""
        await self._follower.poll()

    async def _take(self, ring: KeyRing) -> None:
        self.metrics.keys_loaded(len(ring.tenants))
        logger.info("API keys changed", extra={"fields": {"tenants": len(ring.tenants)}})

    def _refused(self, failure: str) -> None:
        self.metrics.keys_refused()
        logger.error("changed API keys are invalid, keeping the previous ones: %s", quoted(failure))
