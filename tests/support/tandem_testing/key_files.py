"""Key files for tests: a tenant's key is `key-of-NAME`."""

import json
from pathlib import Path
from typing import Any

from tandem_services.gateway.access.keys import digest_of


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


def bearer(tenant: str) -> dict[str, str]:
    """The header that its requests bring."""
    return {"Authorization": f"Bearer {key_of(tenant)}"}


def write_keys(folder: Path, **tenants: dict[str, Any]) -> Path:
    """A key file with these tenants and their limits."""
    path = folder / "keys.json"
    entries = [{"name": name, "sha256": [digest_of(key_of(name))], **fields} for name, fields in tenants.items()]
    path.write_text(json.dumps({"keys": entries}))
    return path
