"""LoRA adapters of a ModelService: those of its spec, and how they fare.

spec.adapters[]        in the service, by its owner; a source may need a volume of the workers
ModelAdapter           an object per adapter (`api.model_adapter`), on volumes that the workers have already
status.adapters[]      of both
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.sources import ClaimSource, HuggingFaceSource, ImageSource
from tandem_operator.api.types import Api, Rule

AdapterName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-._@A-Za-z0-9]*$", min_length=1, max_length=128)]
"""As clients send it in `model`, alone or behind the model's name and a colon."""

AdapterDigest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$", max_length=32)]
"""Of an adapter's content, in hexadecimal."""


class AdapterSource(Api, frozen=True, kw_only=True):
    """Exactly one of its fields."""

    claim: ClaimSource | None = None
    """Directory of a persistent volume. On a claim that the workers mount already, no pod is replaced."""
    image: ImageSource | None = None
    """OCI image with the adapter; a further image replaces the workers' pods one by one."""
    hugging_face: HuggingFaceSource | None = None
    """Adapter of the Hugging Face hub; a further one replaces the workers' pods one by one."""

    RULES: ClassVar = (
        Rule(
            "[has(self.claim), has(self.image), has(self.huggingFace)].filter(x, x).size() == 1",
            "give exactly one of claim, image and huggingFace",
        ),
    )


class Adapter(Api, frozen=True, kw_only=True):
    """A LoRA adapter of the model, saved by PEFT as safetensors."""

    name: AdapterName
    """Name that clients use. No name of the model."""
    source: AdapterSource
    """Its directory. Other content under the same name needs another path, revision, image or digest."""
    digest: AdapterDigest | None = None
    """Digest of its content, as the status shows it: workers refuse other content. Required for a branch or tag of
    the hub, which may change between the starts of two pods."""
    pinned: bool = False
    """Load it on each worker and keep it in memory there, whatever other adapters are used."""

    RULES: ClassVar = (
        Rule(
            "has(self.digest) || !has(self.source.huggingFace) || (has(self.source.huggingFace.revision) && "
            "self.source.huggingFace.revision.matches('^[0-9a-f]{40}$'))",
            "huggingFace: a branch or tag may change between the starts of two pods; set revision to a commit, or "
            "give the digest",
        ),
    )


class FailedWorker(Api, frozen=True, kw_only=True):
    """A worker that has not carried out a command."""

    name: Annotated[str, msgspec.Meta(max_length=253)]
    """Its pod."""
    reason: Annotated[str, msgspec.Meta(max_length=512)]
    """Its error."""


AdapterState = Literal["Pending", "Loaded", "Failed", "Unloading"]


class AdapterStatus(Api, frozen=True, kw_only=True):
    """One adapter."""

    name: str
    """Its name."""
    source: str = ""
    """Its directory, as workers have it below their folder of adapters."""
    model_adapter: str = ""
    """ModelAdapter that it comes from; empty for one of the spec."""
    digest: str = ""
    """Digest of the content that its name stands for; empty before it is loaded."""
    state: AdapterState = "Pending"
    """Loaded: requests can use it. Workers that do not have it in memory load it for the first request."""
    pinned: bool = False
    """It was pinned by the last command."""
    prefill: int = 0
    """Prefill workers that have it in memory."""
    decode: int = 0
    """Decode workers that have it in memory."""
    message: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """Why it is not loaded."""
    failed: Annotated[list[FailedWorker], msgspec.Meta(max_length=8)] = []
    """Workers that have refused it, have not answered, or could not load it for a request; some of them where they are
    many."""
    failed_workers: int = 0
    """Number of these workers."""
