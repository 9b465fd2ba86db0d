"""Objects of the cluster as the operator keeps them: the parts that it reads, and a fingerprint of what others change.

fingerprint   of what a manifest of ours can say: labels, owners, annotations and spec. Equal fingerprints and an
              equal manifest mean that applying again would change nothing. It is compared with what the API server
              answered when it was applied, defaults filled in and amounts in its own writing; so nothing here has
              to know either.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.naming import SERVICE_LABEL
from tandem_operator.controller.kinds import MODEL_SERVICE, POD, WORKER_POOL, ServiceKey
from tandem_operator.planning.observed import Ref

_POD_SPEC = ("nodeName", "terminationGracePeriodSeconds")
_POD_STATUS = ("phase", "podIP", "conditions", "containerStatuses", "initContainerStatuses", "message", "reason")
_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One object as last heard of."""

    ref: Ref
    namespace: str
    uid: str
    version: int
    """resourceVersion: a greater one is newer. Kubernetes promises that they compare as numbers since 1.35, and etcd
    has made them so ever before."""
    owner: str
    """UID of its controller; empty without one."""
    service: str
    """Name of the ModelService that its labels name; empty without."""
    fingerprint: bytes
    body: Manifest
    """Without `managedFields`; of a pod only what is read of it."""

    @property
    def key(self) -> ServiceKey:
        """The service whose reconcile it concerns; a ModelService concerns itself."""
        return ServiceKey(self.namespace, self.ref.name if self.ref.kind == MODEL_SERVICE.name else self.service)

    @property
    def deleting(self) -> bool:
        return self.body["metadata"].get("deletionTimestamp") is not None

    @staticmethod
    def of(body: Mapping[str, Any]) -> "Seen":
        """From the API's own JSON."""
        given = body["metadata"]
        metadata = {name: given[name] for name in _METADATA if name in given}
        ref = Ref(api_version=body["apiVersion"], kind=body["kind"], name=given["name"])
        kept: Manifest = {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": metadata}
        if ref.kind == POD.name:
            kept |= _pod(body)
        else:
            kept |= {part: body[part] for part in ("spec", "status") if part in body}
        return Seen(
            ref=ref,
            namespace=given.get("namespace", ""),
            uid=given["uid"],
            version=int(given["resourceVersion"]),
            owner=next((one["uid"] for one in given.get("ownerReferences", ()) if one.get("controller")), ""),
            service=given.get("labels", {}).get(SERVICE_LABEL, ""),
            fingerprint=b"" if ref.kind == POD.name else _fingerprint(kept),
            body=kept,
        )


def digest(part: object) -> bytes:
    """Equal for equal JSON, whatever the order of keys."""
    return hashlib.blake2b(msgspec.json.encode(part, order="deterministic"), digest_size=16).digest()


def _pod(body: Mapping[str, Any]) -> Manifest:
    spec, status = body.get("spec", {}), body.get("status", {})
    containers = [{key: one[key] for key in ("name", "ports") if key in one} for one in spec.get("containers", ())]
    return {
        "spec": {"containers": containers, **{name: spec[name] for name in _POD_SPEC if name in spec}},
        "status": {name: status[name] for name in _POD_STATUS if name in status},
    }


def _fingerprint(body: Manifest) -> bytes:
    metadata, spec = body["metadata"], dict(body.get("spec", {}))
    if body["kind"] == WORKER_POOL.name:
        # Whoever owns the pool writes this; manifests never do.
        spec.pop("replicas", None)
    # Controllers of the cluster keep notes on objects under their own names.
    notes = {key: text for key, text in metadata.get("annotations", {}).items() if "kubernetes.io/" not in key}
    return digest([metadata.get("labels"), notes, metadata.get("ownerReferences"), spec])
