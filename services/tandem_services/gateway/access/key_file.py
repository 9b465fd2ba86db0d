"""The key file: JSON that says which keys are valid and what their holders may do (docs/limits.md).

    {"keys": [{"name": "search", "sha256": ["9f86…"], "requests_per_minute": 600, …}, …]}

Several files, as in the folder of a Kubernetes Secret, count as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from secrets import compare_digest

import msgspec

from tandem_engine.logs import quoted
from tandem_services.common.errors import ServiceError
from tandem_services.gateway.access.api_key import digest_of
from tandem_services.gateway.access.tenants import Tenant

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
