"""Objects of a ModelCache: the claim, the Jobs that download and remove commits, and the policy of their pods.

    claim ─▶ PATH/tandem-cache/NAME/COMMIT/…     the commit that pods mount, by `subPath`, read-only

A Job runs `tandem pull --into`. Its pod has no account of the cluster, and the rights of the Pod Security Standard
restricted.
"""

import hashlib
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

from tandem_operator.api.model_cache import HubSource, ModelCacheSpec
from tandem_operator.api.model_service import GROUP
from tandem_operator.api.pods import PodOverrides
from tandem_operator.builders.containers import (
    TMP,
    Manifest,
    container_port,
    container_security,
    parse_quantity,
    pod_security,
    pod_template,
    resources_of,
    scratch,
    value,
)
from tandem_operator.builders.model_mount import claim_volume
from tandem_operator.builders.naming import CACHE_LABEL, cache_labels_of
from tandem_operator.builders.policies import DNS, HTTP, HTTPS, NAMESPACE_NAME
from tandem_operator.settings import OperatorSettings

FOLDER = "tandem-cache"
MOUNT = "/cache"
CONTAINER = "download"
PROGRESS_PORT = 8080
PORT_NAME = "progress"
TERMINATION_LOG = "/dev/termination-log"
SCRATCH = "256Mi"

REQUEST = f"{GROUP}/request"
"""Annotation of a Job that downloads: hash of the source."""

KEEP = f"{GROUP}/keep"
"""Annotation of a Job that removes commits: those that stay."""

SPEC = f"{GROUP}/spec"
"""Annotation of a Job: hash of its manifest. A Job cannot change, so that another one replaces it."""

PERMANENT_STATUS = 2
"""Exit status of a download that another attempt cannot mend."""

PRUNE_SECONDS, PRUNE_RETRIES = 3600, 3


def request_of(source: HubSource) -> str:
    """Equal for equal sources."""
    return _hash([source.id, source.revision, source.endpoint])


def claim_name_of(name: str, spec: ModelCacheSpec) -> str:
    """Of the claim with the weights."""
    claim = spec.storage.claim
    return name if claim is None else claim.claim_name


def folder_of(name: str, spec: ModelCacheSpec) -> str:
    """Of all commits, within the volume."""
    claim = spec.storage.claim
    return f"{'' if claim is None else claim.path}/{FOLDER}/{name}".lstrip("/")


def download_job(name: str, namespace: str, spec: ModelCacheSpec, settings: OperatorSettings) -> Manifest:
    """Fetches the commit that the source names now."""
    source, request = spec.source.hugging_face, request_of(spec.source.hugging_face)
    words = [f"{source.id}@{source.revision}"]
    new = spec.storage.new_claim
    if new is not None:
        words += ["--max-bytes", str(int(parse_quantity(new.size)))]
    limits = {"backoffLimit": spec.download.retries, "activeDeadlineSeconds": spec.download.timeout_seconds}
    return _job(f"{name}-download-{request}", name, namespace, spec, settings, words, {REQUEST: request}, limits)


def prune_job(
    name: str, namespace: str, spec: ModelCacheSpec, settings: OperatorSettings, commit: str, keep: Iterable[str]
) -> Manifest:
    """Removes all commits but `commit`, which is whole, and those of `keep`."""
    kept = sorted(keep)
    words = [f"{spec.source.hugging_face.id}@{commit}", "--prune", *(word for one in kept for word in ("--keep", one))]
    limits = {"backoffLimit": PRUNE_RETRIES, "activeDeadlineSeconds": PRUNE_SECONDS}
    notes = {KEEP: ",".join([commit, *kept])}
    return _job(f"{name}-prune-{_hash([commit, *kept])}", name, namespace, spec, settings, words, notes, limits)


def _job(
    job: str,
    name: str,
    namespace: str,
    spec: ModelCacheSpec,
    settings: OperatorSettings,
    words: list[str],
    notes: Mapping[str, str],
    limits: Mapping[str, int],
) -> Manifest:
    labels = cache_labels_of(name)
    body: Manifest = {
        **limits,
        "template": _template(name, spec, settings, words),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job,
            "namespace": namespace,
            "labels": labels,
            "annotations": {**notes, SPEC: _hash(body)},
        },
        "spec": body,
    }


def _template(name: str, spec: ModelCacheSpec, settings: OperatorSettings, words: list[str]) -> Manifest:
    download = spec.download
    tmp, tmp_mount = scratch("tmp", TMP, limit=SCRATCH)
    container: Manifest = {
        "name": CONTAINER,
        "image": download.image or settings.services_image,
        "command": ["tandem", "pull"],
        "args": [
            *words,
            *("--into", f"{MOUNT}/{folder_of(name, spec)}"),
            *("--progress-port", str(PROGRESS_PORT)),
            *("--result", TERMINATION_LOG),
        ],
        "env": _environment(spec.source.hugging_face),
        "ports": [container_port(PORT_NAME, PROGRESS_PORT)],
        "resources": resources_of(download.resources),
        "securityContext": container_security(),
        "terminationMessagePath": TERMINATION_LOG,
        "volumeMounts": [{"name": "cache", "mountPath": MOUNT}, tmp_mount],
    }
    overrides = PodOverrides(node_selector=download.node_selector, tolerations=download.tolerations)
    pod: Manifest = {
        "restartPolicy": "Never",
        # What kubelets made again in a volume that was wiped has another group than its root.
        "securityContext": {**pod_security(download.run_as_user), "fsGroupChangePolicy": "Always"},
        "containers": [container],
        "volumes": [claim_volume("cache", claim_name_of(name, spec), read_only=False), tmp],
        **({"imagePullSecrets": [{"name": one} for one in download.pull_secrets]} if download.pull_secrets else {}),
    }
    return pod_template(labels=cache_labels_of(name), overrides=overrides, spec=pod)


def _environment(source: HubSource) -> list[Manifest]:
    variables = [value("HOME", TMP), value("HF_HUB_DISABLE_TELEMETRY", "1")]
    if source.endpoint is not None:
        variables.append(value("HF_ENDPOINT", source.endpoint.rstrip("/")))
    if source.token_secret is not None:
        reference = msgspec.to_builtins(source.token_secret)
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return variables


def halted(job: Manifest) -> Manifest:
    """The same Job without further pods."""
    return {**job, "spec": {**job["spec"], "parallelism": 0}}


def new_claim(name: str, namespace: str, spec: ModelCacheSpec) -> list[Manifest]:
    """The claim that the operator makes; none where the spec names one."""
    new = spec.storage.new_claim
    if new is None:
        return []
    body: Manifest = {"accessModes": [new.access_mode], "resources": {"requests": {"storage": str(new.size)}}}
    if new.storage_class_name is not None:
        body["storageClassName"] = new.storage_class_name
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace, "labels": cache_labels_of(name)},
            "spec": body,
        }
    ]


def download_policy(name: str, namespace: str, spec: ModelCacheSpec, settings: OperatorSettings) -> list[Manifest]:
    """The operator reads the progress; the pod reaches DNS and the port of the hub."""
    if not spec.download.network_policy:
        return []
    operator: Manifest = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: settings.operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
    }
    ports = [{"protocol": kind, "port": port} for port in DNS for kind in ("UDP", "TCP")]
    hub = [{"protocol": "TCP", "port": port} for port in _hub_ports(spec.source.hugging_face)]
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": f"{name}-model-cache", "namespace": namespace, "labels": cache_labels_of(name)},
            "spec": {
                "podSelector": {"matchLabels": {CACHE_LABEL: name}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [operator], "ports": [{"protocol": "TCP", "port": PROGRESS_PORT}]}],
                "egress": [{"ports": ports}, {"ports": hub}],
            },
        }
    ]


def _hub_ports(source: HubSource) -> list[int]:
    """Of the endpoint, and of storage that a hub redirects to."""
    if source.endpoint is None:
        return [HTTPS]
    parts = urlsplit(source.endpoint)
    own = parts.port or (HTTPS if parts.scheme == "https" else HTTP)
    return sorted({own, HTTPS})


def _hash(parts: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=4).hexdigest()
