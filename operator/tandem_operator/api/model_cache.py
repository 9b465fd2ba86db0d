"""`ModelCache`: the weights of one repository on a volume, downloaded once and mounted read-only by all pods.

    applied → the claim is there → one Job downloads the revision → `Ready` → ModelServices that name it begin
    another revision → another Job; services go over when it is whole → the former commit is removed when unused

There is no finalizer: Kubernetes removes what the ModelCache owns, and keeps a claim as long as pods use it.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.pods import Resources, SecretKey, Toleration
from tandem_operator.api.sources import HubId, HubRevision
from tandem_operator.api.types import (
    Api,
    Conditions,
    DnsName,
    HttpUrl,
    Image,
    Labels,
    Name,
    Opaque,
    Quantity,
    RelativePath,
    Rule,
    within_folder,
)


class HubSource(Api, frozen=True, kw_only=True):
    """A repository of a Hugging Face hub. Its weights are read as safetensors alone."""

    id: HubId
    """owner/name."""
    revision: HubRevision = "main"
    """Branch, tag or commit. A branch or tag is looked up once, when it is downloaded: its later commits need a change
    of this field."""
    token_secret: SecretKey | None = None
    """Access token, for gated and private models."""
    endpoint: HttpUrl | None = None
    """Address of a mirror; default: https://huggingface.co."""

    RULES: ClassVar = (within_folder("revision"),)


class CacheSource(Api, frozen=True, kw_only=True):
    """Where the weights come from."""

    hugging_face: HubSource
    """Repository of a Hugging Face hub."""


class ExistingClaim(Api, frozen=True, kw_only=True):
    """A PersistentVolumeClaim that people have made. Its files stay when the ModelCache is deleted."""

    claim_name: Name
    """PersistentVolumeClaim in the same namespace."""
    path: RelativePath = ""
    """Directory within the volume; empty: its root. Below it the weights are in tandem-cache/NAME/COMMIT."""


class NewClaim(Api, frozen=True, kw_only=True):
    """A PersistentVolumeClaim that is made for the ModelCache, has its name, and is deleted with it."""

    size: Quantity
    """Its size. During a change of the revision both commits need space. It can be raised where the StorageClass
    allows that."""
    storage_class_name: DnsName | None = None
    """StorageClass; default: that of the cluster."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """How it can be mounted. With ReadWriteOnce all pods that use it run on one node."""


class CacheStorage(Api, frozen=True, kw_only=True):
    """Exactly one of claim and newClaim."""

    claim: ExistingClaim | None = None
    """An existing PersistentVolumeClaim."""
    new_claim: NewClaim | None = None
    """A PersistentVolumeClaim that the operator makes."""
    node: Opaque = {}
    """Always refused: a copy on the disk of each node needs hostPath volumes, which the Pod Security Standard
    restricted forbids. Use a claim whose StorageClass keeps copies on nodes."""

    RULES: ClassVar = (
        Rule(
            "!has(self.node)",
            "node: needs hostPath volumes, which the Pod Security Standard restricted forbids; use claim or newClaim "
            "with a StorageClass that keeps the volume, or a cache of it, on nodes",
        ),
        Rule("has(self.node) || has(self.claim) != has(self.newClaim)", "give exactly one of claim and newClaim"),
        Rule(
            "has(self.claim) == has(oldSelf.claim) && (!has(self.claim) || self.claim == oldSelf.claim)",
            "the claim cannot change: pods use the weights on it; make another ModelCache",
        ),
        Rule(
            "!has(self.newClaim) || !has(oldSelf.newClaim) || "
            "(has(self.newClaim.storageClassName) == has(oldSelf.newClaim.storageClassName) && "
            "(!has(self.newClaim.storageClassName) || "
            "self.newClaim.storageClassName == oldSelf.newClaim.storageClassName) && "
            "has(self.newClaim.accessMode) == has(oldSelf.newClaim.accessMode) && "
            "(!has(self.newClaim.accessMode) || self.newClaim.accessMode == oldSelf.newClaim.accessMode))",
            "newClaim: of a claim that exists only size can change; make another ModelCache",
        ),
    )


class CacheDownload(Api, frozen=True, kw_only=True):
    """The Job that downloads."""

    image: Image | None = None
    """Image with the `tandem` command; default: that of gateways of the operator's version."""
    pull_secrets: Annotated[list[Name], msgspec.Meta(max_length=8)] = []
    """Secrets for pulling the image."""
    resources: Resources = Resources(requests={"cpu": "500m", "memory": "512Mi"}, limits={"memory": "2Gi"})
    """Resources of its pod."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 5
    """Pods that may follow one that failed for a reason that may pass. Each continues where the one before ended."""
    timeout_seconds: Annotated[int, msgspec.Meta(ge=60, le=604800)] = 86400
    """Seconds after which a download is stopped and reported. What has arrived is kept."""
    node_selector: Labels = {}
    """Labels that its node must have."""
    tolerations: Annotated[list[Toleration], msgspec.Meta(max_length=32)] = []
    """Taints that its pod tolerates."""
    run_as_user: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 10001
    """User and group that own the files; never root. All users may read them."""
    network_policy: bool = True
    """Allow its pod only DNS, the port of the hub, and requests of the operator for its progress."""


class ModelCacheSpec(Api, frozen=True, kw_only=True):
    """What to keep where."""

    source: CacheSource
    """Source of the weights. Another revision is downloaded beside the former one, another repository is another
    ModelCache."""
    storage: CacheStorage
    """Where they are kept."""
    download: CacheDownload = CacheDownload()
    """How they are downloaded."""

    RULES: ClassVar = (
        Rule(
            "self.source.huggingFace.id == oldSelf.source.huggingFace.id",
            "source.huggingFace.id cannot change: make another ModelCache",
        ),
    )


class CachedCommit(Api, frozen=True, kw_only=True):
    """A whole commit on the volume."""

    commit: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}$", max_length=40)]
    """Its id."""
    request: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}$", max_length=8)]
    """Hash of the source that was requested."""
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes."""
    fingerprint: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$", max_length=64)]
    """SHA-256 over names, sizes and digests of its files."""
    unused_since: str = ""
    """Since when no workers use it, RFC 3339; empty while some do, and of the newest one."""


CacheState = Literal["Pending", "Downloading", "Ready", "Failed"]


class ModelCacheStatus(Api, frozen=True, kw_only=True):
    """Observed state."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Conditions = []
    """Ready: a whole commit is there, which services use. Downloading, and Failed: of the source as the spec has it."""
    state: CacheState = "Pending"
    """Of the source as the spec has it: for `kubectl get`."""
    progress: str = ""
    """Share that has arrived: for `kubectl get`."""
    size: str = ""
    """Size: for `kubectl get`."""
    error: str = ""
    """Short error: for `kubectl get`. Conditions have the details."""
    claim_name: str = ""
    """PersistentVolumeClaim with the weights."""
    path: str = ""
    """Directory of the newest whole commit within the volume; empty before there is one."""
    commit: str = ""
    """Its id."""
    bytes_done: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes that have arrived of a download under way."""
    bytes_total: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Bytes of it altogether."""
    bytes_per_second: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Rate, an average of the last half minute."""
    current_file: Annotated[str, msgspec.Meta(max_length=255)] = ""
    """One of the files under way."""
    commits: Annotated[list[CachedCommit], msgspec.Meta(max_length=16)] = []
    """Whole commits on the volume, newest first."""


class ModelCache(Api, frozen=True, kw_only=True):
    """Weights on a volume, downloaded once and mounted read-only by all pods of the ModelServices that name it."""

    spec: ModelCacheSpec
    """Desired state."""
    status: ModelCacheStatus = ModelCacheStatus()
    """Observed state, written by the operator."""

    RULES: ClassVar = (
        Rule(
            "self.metadata.name.size() <= 40", "metadata.name: at most 40 characters, for names of Jobs begin with it"
        ),
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name: a DNS label: a-z, 0-9 and '-', first a letter, last no '-'",
        ),
    )
