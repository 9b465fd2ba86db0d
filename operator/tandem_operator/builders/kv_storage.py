"""Where workers keep KV pages in files: on a claim, on an empty volume of the pod, or on another of its volumes."""

from math import ceil

from tandem_operator.api.engine import Storage
from tandem_operator.builders.containers import Manifest, scratch
from tandem_operator.builders.model_mount import claim_volume

VOLUME = "kv-storage"
FOLDER = "/kv"

DEFAULT_GIB = 16.0
"""As `--hicache-storage-size`."""

BLOCKS = 1.1
"""What files take on a disk over their bytes: 2 KiB more of each on average, and they may be as small as 32 KiB."""

UNFINISHED_GIB = 1
"""Of an empty volume beyond its files: those that are being written. A pod that takes more is evicted."""


def storage_folder(storage: Storage) -> str:
    """Where the container has it."""
    return storage.directory or f"{FOLDER}/{storage.path or ''}".rstrip("/")


def storage_volume(storage: Storage | None) -> list[tuple[Manifest, Manifest]]:
    """Volume and mount; none where there are no files, and where the pod has a volume for them."""
    if storage is None or storage.directory is not None:
        return []
    if storage.claim_name is not None:
        return [(claim_volume(VOLUME, storage.claim_name, read_only=False), {"name": VOLUME, "mountPath": FOLDER})]
    limit = ceil((storage.size_gib or DEFAULT_GIB) * BLOCKS) + UNFINISHED_GIB
    return [scratch(VOLUME, FOLDER, limit=f"{limit}Gi")]
