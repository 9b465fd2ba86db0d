"""What the gateways of a ModelGateway serve: a models file in a ConfigMap, and keys and passwords in a Secret.

    ModelService ─▶ `entry_of` ─▶ models.json           ConfigMap, mounted as a folder
                 ─▶ `fleet_files` ─▶ one file each      Secret, mounted as a folder

Both are volumes under fixed names, so a service that comes or goes changes no pod: kubelets replace the files, and the
gateways follow (docs/multi-model.md).

The name of a key file contains a digest of its contents: other keys are another entry, which gateways open again.
Passwords and certificate authorities are read at each connect, and keep their names.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tandem_operator.api.pods import SecretKey
from tandem_operator.builders.containers import Manifest, secret_volume
from tandem_operator.builders.model_mount import FROM_WORKERS, ModelMount
from tandem_operator.builders.naming import fleets_secret_name, models_name
from tandem_operator.builders.redis import redis_password, redis_url
from tandem_operator.builders.served import CLAIMS_FOLDER, FROM_ZERO_S, Served, may_be_zero
from tandem_operator.builders.worker import CURVE_KEY

MODELS_FOLDER = "/etc/tandem/models"
MODELS_FILE = "models.json"
FLEETS_FOLDER = "/etc/tandem/fleets"
DIGITS = 8


class FleetFile(NamedTuple):
    """A file that gateways need for one service."""

    name: str
    """Of the key in the Secret, and of the file."""
    source: SecretKey
    """Where its contents come from."""


def shared_mount(gateway: str, claims: Iterable[str]) -> ModelMount:
    """Models file, keys and passwords, and the claims, of the pods of a ModelGateway."""
    models = {"name": "models", "configMap": {"name": models_name(gateway), "defaultMode": 0o444}}
    fleets, fleets_place = secret_volume("fleets", fleets_secret_name(gateway), FLEETS_FOLDER)
    names = {claim: f"claim-{number}" for number, claim in enumerate(claims)}
    return ModelMount(
        folder=f"{MODELS_FOLDER}/{MODELS_FILE}",
        volumes=(
            models,
            fleets,
            *(
                {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
                for claim, name in names.items()
            ),
        ),
        mounts=(
            {"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True},
            fleets_place,
            *(
                {"name": name, "mountPath": f"{CLAIMS_FOLDER}/{claim}", "readOnly": True}
                for claim, name in names.items()
            ),
        ),
    )


def tokenizer_source(service: Served, gateway: Served) -> str | None:
    """`model` of the entry of a service: a folder that the gateways have, or `FROM_WORKERS`; None where a spec requires
    the folder and they do not have it."""
    wanted = service.spec.gateway.tokenizer or gateway.spec.gateway.tokenizer
    folder = None if wanted == "workers" else _tokenizer_folder(service, gateway.claims)
    return FROM_WORKERS if folder is None and wanted != "model" else folder


def _tokenizer_folder(service: Served, claims: Iterable[str]) -> str | None:
    source = service.spec.model
    if source.path is not None:
        return source.path
    if source.claim is not None and source.claim.claim_name in claims:
        return f"{CLAIMS_FOLDER}/{source.claim.claim_name}/{source.claim.path}".rstrip("/")
    hub = source.hugging_face
    if hub is not None and hub.cache_claim is not None and hub.cache_claim in claims:
        return f"{CLAIMS_FOLDER}/{hub.cache_claim}/{hub.id}/{hub.revision}"
    return None


def fleet_files(service: Served, keys: bytes) -> Iterator[FleetFile]:
    """`keys`: content of its key file."""
    digest = hashlib.blake2b(keys, digest_size=DIGITS // 2).hexdigest()
    yield FleetFile(f"{service.name}.{digest}.json", SecretKey(name=service.curve_secret, key=CURVE_KEY))
    password = redis_password(service.spec.redis, service.name)
    if password is not None:
        yield FleetFile(f"{service.name}.redis-password", password)
    external = service.spec.redis.external
    if external is not None and external.ca_secret is not None:
        yield FleetFile(f"{service.name}.redis-ca", external.ca_secret)
    if external is not None and external.sentinel_password is not None:
        yield FleetFile(f"{service.name}.redis-sentinel", external.sentinel_password)


def entry_of(service: Served, model: str, files: Iterable[FleetFile]) -> dict[str, Any]:
    """The entry of a service in the models file, whose fields are those of `tandem gateway`. `model`: see
    `tokenizer_source`."""
    paths = {file.name: f"{FLEETS_FOLDER}/{file.name}" for file in files}
    spec, gateway, limits = service.spec, service.spec.gateway, service.spec.gateway.limits
    slo = spec.slo
    sessions = service.engine("decode").sessions
    ca_file = paths.get(f"{service.name}.redis-ca", "")
    sentinel_file = paths.get(f"{service.name}.redis-sentinel", "")
    entry: dict[str, Any] = {
        "model": model,
        "served_model_name": [service.model_name, *spec.aliases],
        "cluster": service.cluster,
        "redis_url": redis_url(spec.redis, service.name, ca_file=ca_file, sentinel_password_file=sentinel_file),
        "redis_password_file": paths.get(f"{service.name}.redis-password"),
        "curve_keys": next(path for name, path in paths.items() if name.endswith(".json")),
        "tool_call_parser": gateway.tool_call_parser,
        "reasoning_parser": gateway.reasoning_parser,
        "router_policy": gateway.router_policy,
        "router_exploration": gateway.router_exploration,
        "local_prefill_tokens": gateway.local_prefill_tokens,
        "prefill_fallback": gateway.prefill_fallback,
        "parse_special_tokens": None if gateway.parse_special_tokens else False,
        "session_ttl": None if sessions is None else sessions.ttl_seconds,
        "from_zero_timeout": FROM_ZERO_S if may_be_zero(spec) else None,
        "max_waiting_requests": limits.max_waiting_requests,
        "queue_timeout": limits.queue_timeout_seconds,
        "slo_ttft_ms": None if slo is None or slo.ttft_seconds is None else 1000 * slo.ttft_seconds,
        "slo_itl_ms": None if slo is None or slo.itl_seconds is None else 1000 * slo.itl_seconds,
        "slo_percentile": None if slo is None else slo.percentile,
        "slo_admission": None if slo is None else slo.admission,
    }
    return {name: value for name, value in entry.items() if value is not None}


def models_config_map(gateway: Served, text: str) -> Manifest:
    """`text`: the models file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(gateway, models_name(gateway.name)),
        "data": {MODELS_FILE: text},
    }


def fleets_secret(gateway: Served, files: Mapping[str, str]) -> Manifest:
    """`files`: contents by name, in base64."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(gateway, fleets_secret_name(gateway.name)),
        "type": "Opaque",
        "data": dict(sorted(files.items())),
    }


def _metadata(gateway: Served, name: str) -> Manifest:
    return {"name": name, "namespace": gateway.namespace, "labels": gateway.labels("gateway")}
