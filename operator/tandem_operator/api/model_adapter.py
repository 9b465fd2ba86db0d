"""`ModelAdapter`: one LoRA adapter of a ModelService, as an object of its own.

A user who may write ModelAdapters of a namespace adds adapters to its services without a right on these. A ModelAdapter
therefore names no volume that the workers do not mount: its source is a claim of `spec.adapterClaims` (or of an adapter
of the spec). Creating or deleting one changes no pod. There is no finalizer: the service's status lists it until
it is unloaded.
"""

from typing import Annotated, ClassVar

import msgspec

from tandem_operator.api.adapters import AdapterDigest, AdapterName, FailedWorker
from tandem_operator.api.sources import ClaimSource
from tandem_operator.api.types import Api, Conditions, Name, Rule


class ModelAdapterSource(Api, frozen=True, kw_only=True):
    """A directory that the workers have."""

    claim: ClaimSource
    """Directory of a persistent volume of `spec.adapterClaims` of the ModelService."""


class ModelAdapterSpec(Api, frozen=True, kw_only=True):
    """The adapter."""

    service_name: Name
    """ModelService in the same namespace. It cannot change."""
    name: AdapterName | None = None
    """Name that clients use; default: the name of the resource. An adapter of the service's spec, or an older
    ModelAdapter, with the same name has priority."""
    source: ModelAdapterSource
    """Its directory. Other content under the same name needs another path or digest."""
    digest: AdapterDigest | None = None
    """Digest of its content: workers refuse other content."""
    pinned: bool = False
    """Load it on each worker and keep it in memory there, whatever other adapters are used."""

    RULES: ClassVar = (
        Rule("self.serviceName == oldSelf.serviceName", "serviceName cannot change: make another ModelAdapter"),
    )


class LoadedWorker(Api, frozen=True, kw_only=True):
    """A worker that has the adapter in memory."""

    name: Annotated[str, msgspec.Meta(max_length=253)]
    """Its pod."""


class ModelAdapterStatus(Api, frozen=True, kw_only=True):
    """Observed state."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    conditions: Conditions = []
    """Accepted: the service serves it under this name. Ready: requests can use it."""
    digest: str = ""
    """Digest of the content that its name stands for."""
    loaded: int = 0
    """Workers that have it in memory; others load it for the first request that needs it."""
    workers: Annotated[list[LoadedWorker], msgspec.Meta(max_length=64)] = []
    """These workers, at most 64."""
    failed: Annotated[list[FailedWorker], msgspec.Meta(max_length=8)] = []
    """Workers that have refused it, have not answered, or could not load it for a request; some of them where they are
    many."""
    failed_workers: int = 0
    """Number of these workers."""


class ModelAdapter(Api, frozen=True, kw_only=True):
    """A LoRA adapter of a ModelService, added and removed while the service runs, without new pods."""

    spec: ModelAdapterSpec
    """Desired state."""
    status: ModelAdapterStatus = ModelAdapterStatus()
    """Observed state, written by the operator."""

    RULES: ClassVar = (
        Rule(
            "has(self.spec.name) || self.metadata.name.size() <= 128",
            "metadata.name: an adapter has a name of at most 128 characters; give spec.name",
        ),
    )
