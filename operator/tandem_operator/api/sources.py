"""Where checkpoints come from: of models, and of adapters."""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.pods import Resources, SecretKey
from tandem_operator.api.types import AbsolutePath, Api, Image, Name, Quantity, RelativePath, Rule, within_folder


class ClaimSource(Api, frozen=True, kw_only=True):
    """A directory of a persistent volume, mounted read-only by all pods (access mode ReadOnlyMany or more)."""

    claim_name: Name
    """PersistentVolumeClaim in the same namespace."""
    path: RelativePath = ""
    """Directory of the checkpoint within the volume; empty: its root."""


class ImageSource(Api, frozen=True, kw_only=True):
    """An OCI image or artifact that holds the checkpoint, mounted as a volume (Kubernetes 1.31 and later)."""

    reference: Image
    """Image, preferably by digest."""
    path: RelativePath = ""
    """Directory of the checkpoint within the image; empty: its root."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When it is pulled; empty: the cluster's default."""


HubId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-._A-Za-z0-9]*/[A-Za-z0-9][-._A-Za-z0-9]*$", max_length=192)]
"""owner/name."""

HubRevision = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-._/A-Za-z0-9]*$", max_length=128)]
"""A branch, a tag or a commit."""


class HuggingFaceSource(Api, frozen=True, kw_only=True):
    """A model of the Hugging Face hub, downloaded by an init container of each pod."""

    id: HubId
    """owner/name."""
    revision: HubRevision = "main"
    """Branch, tag or commit. With a commit all pods of a revision have the same model, whenever they start."""
    token_secret: SecretKey | None = None
    """Access token, for gated models."""
    cache_claim: Name | None = None
    """PersistentVolumeClaim for downloads; without it each pod has a separate copy."""
    size_limit: Quantity | None = None
    """Size limit of a pod's separate copy, by default 1Ti, of an adapter 64Gi; a pod that exceeds it is evicted."""
    resources: Resources = Resources(requests={"cpu": "250m", "memory": "512Mi"}, limits={"memory": "4Gi"})
    """Resources of the init container that downloads."""

    RULES: ClassVar = (
        within_folder("revision"),
        Rule(
            "!(has(self.sizeLimit) && has(self.cacheClaim))",
            "sizeLimit is that of a pod's own copy, and with cacheClaim there is none: give one of them",
        ),
    )


class CacheRef(Api, frozen=True, kw_only=True):
    """A ModelCache of the same namespace."""

    name: Name
    """Its name."""


class ModelSource(Api, frozen=True, kw_only=True):
    """Exactly one of its fields."""

    path: AbsolutePath | None = None
    """Directory within the engine's and the gateway's image."""
    claim: ClaimSource | None = None
    """Directory of a persistent volume."""
    image: ImageSource | None = None
    """OCI image with the checkpoint."""
    hugging_face: HuggingFaceSource | None = None
    """Model of the Hugging Face hub."""
    cache_ref: CacheRef | None = None
    """A ModelCache, which downloads the model once for all pods. They start when it is ready."""

    RULES: ClassVar = (
        within_folder("path"),
        Rule(
            "[has(self.path), has(self.claim), has(self.image), has(self.huggingFace), has(self.cacheRef)]"
            ".filter(x, x).size() == 1",
            "give exactly one of path, claim, image, huggingFace and cacheRef",
        ),
        Rule(
            "has(self.path) == has(oldSelf.path) && has(self.claim) == has(oldSelf.claim) && "
            "has(self.image) == has(oldSelf.image) && has(self.huggingFace) == has(oldSelf.huggingFace) && "
            "has(self.cacheRef) == has(oldSelf.cacheRef)",
            "the kind of source cannot change: make another ModelService",
        ),
    )
