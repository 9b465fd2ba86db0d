"""Plans a ModelGateway: which services its gateways serve, and what to write and report. Pure.

    services that refer to it ─▶ `shared_models` ─▶ entries of the models file, keys and passwords, their state
    spec, observed state, these ─▶ `make_gateway_plan` ─▶ manifests, conditions

A service is served once its Secrets exist. The first that has a name keeps it: another one with that name is refused
with `NameTaken`, or continues with its former entry. A service whose spec is invalid continues as it was, too.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from tandem_operator.api.model_gateway import ModelGatewayStatus, ReferringService
from tandem_operator.api.types import Condition, condition
from tandem_operator.builders.containers import Manifest
from tandem_operator.builders.gateway import gateway_deployment, gateway_service, http_route
from tandem_operator.builders.models_file import FleetFile, entry_of, fleets_secret, models_config_map, tokenizer_source
from tandem_operator.builders.naming import cluster_name, gateway_name
from tandem_operator.builders.policies import disruption_budgets, network_policies, pod_monitors
from tandem_operator.builders.redis import redis_deployment, redis_ports, redis_service
from tandem_operator.builders.served import Served
from tandem_operator.planning.observed import Observed, Ref
from tandem_operator.planning.plan import Changes, endpoint_of, generated_secrets, with_patches
from tandem_operator.planning.status import (
    ARGUMENTS_ACCEPTED,
    DEGRADED,
    READY,
    REDIS_READY,
    VALID,
    arguments_accepted,
    available,
    degraded,
    first_missing,
    invalid,
    name_taken,
    redis_ready,
    secrets_available,
    settled,
    status_error,
)
from tandem_operator.planning.validation import shared_problems
from tandem_operator.settings import OperatorSettings

SECRETS_AVAILABLE = "SecretsAvailable"
GATEWAYS_READY = "GatewaysReady"
SERVICES_SERVED = "ServicesServed"
NEEDED = (VALID, SECRETS_AVAILABLE, GATEWAYS_READY)
"""What must be true for `Ready`, in this order."""

MAX_MODELS = 64
"""Entries of a models file."""

MAX_FILES_BYTES = 1 << 20
"""Contents of a Secret."""

MAX_SHOWN = 128
"""Services in a status."""

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Referring:
    """A ModelService that refers to the ModelGateway."""

    name: str
    created: str
    """RFC 3339."""
    service: Served | None
    """None: its spec cannot be read."""
    reason: str = ""
    """Why it cannot be served as its spec has it; empty if it can."""
    message: str = ""
    files: tuple[FleetFile, ...] = ()
    contents: Mapping[str, str] = field(default_factory=dict)
    """Of `files` by name, in base64."""

    @property
    def names(self) -> list[str]:
        """What clients call its model."""
        return [] if self.service is None else [self.service.model_name, *self.service.spec.aliases]


class _Known(msgspec.Struct):
    """What is read of an entry."""

    cluster: str
    served_model_name: Annotated[list[str], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Former:
    """What the gateways were given last."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    """By cluster."""
    files: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(models_file: str, files: Mapping[str, str]) -> "Former":
        """`models_file`: its text, as written by this or another release of the operator; "" before the first."""
        try:
            entries = json.loads(models_file)["models"] if models_file else []
            known = msgspec.convert(entries, list[_Known])
            return Former(entries={one.cluster: entry for one, entry in zip(known, entries, strict=True)}, files=files)
        except (ValueError, KeyError, TypeError, msgspec.ValidationError):
            # Edited by hand: it is written again.
            return Former(files=files)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedModels:
    """What the gateways are given, and what becomes of each service."""

    models_file: str
    files: Mapping[str, str]
    services: tuple[ReferringService, ...]
    redis_ports: tuple[int, ...]
    """Of the external Redis of its services."""


@dataclass(slots=True)
class _Selection:
    """Entries so far."""

    gateway: Served
    former: Former
    holders: Mapping[str, str]
    """Services by the names that they have, and still want."""
    entries: dict[str, Entry] = field(default_factory=dict)
    """By service."""
    files: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    """Services by name."""

    def add(self, one: Referring) -> ReferringService:
        """The state of a service, which gets an entry if it can."""
        reason, message = self._refusal(one)
        shown = ReferringService(name=one.name, models=one.names[:32], reason=reason, message=message)
        if not reason and one.service is not None:
            model = tokenizer_source(one.service, self.gateway)
            assert model is not None, "a service without a tokenizer is refused"
            self._take(one.name, entry_of(one.service, model, one.files), one.contents)
            return msgspec.structs.replace(shown, served=True)
        entry = self.former.entries.get(cluster_name(self.gateway.namespace, one.name))
        if entry is None or reason == "NoTokenizer" or not self.taken.keys().isdisjoint(entry["served_model_name"]):
            return shown
        self._take(one.name, entry, self._former_files(entry))
        return msgspec.structs.replace(shown, served=True, models=entry["served_model_name"][:32])

    def _refusal(self, one: Referring) -> tuple[str, str]:
        if one.reason or one.service is None:
            return one.reason, one.message
        if tokenizer_source(one.service, self.gateway) is None:
            hub = one.service.spec.model.hugging_face
            claim = one.service.spec.model.claim
            name = claim.claim_name if claim is not None else hub.cache_claim if hub is not None else ""
            message = (
                f"its tokenizer is on claim {name!r}, which the gateways of ModelGateway {self.gateway.name!r} do not "
                f"mount; add it to spec.claims there, or set spec.gateway.tokenizer to workers"
            )
            return "NoTokenizer", message
        for name in one.names:
            holder = self.taken.get(name) or self.holders.get(name, one.name)
            if holder != one.name:
                message = (
                    f"{name!r} is a name of ModelService {holder!r} behind ModelGateway {self.gateway.name!r}; change "
                    f"servedModelName or aliases"
                )
                return "NameTaken", message
        if len(self.entries) >= MAX_MODELS:
            return "TooManyModels", f"ModelGateway {self.gateway.name!r} has {MAX_MODELS} services already; use another"
        if _bytes_of({**self.files, **one.contents}) > MAX_FILES_BYTES:
            message = (
                f"with its certificate authority the Secret of ModelGateway {self.gateway.name!r} would have more than "
                f"{MAX_FILES_BYTES} bytes; leave only the required authorities in caSecret, or use another ModelGateway"
            )
            return "FilesTooLarge", message
        return "", ""

    def _take(self, service: str, entry: Entry, files: Mapping[str, str]) -> None:
        self.entries[service] = entry
        self.files |= files
        self.taken |= dict.fromkeys(entry["served_model_name"], service)

    def _former_files(self, entry: Entry) -> dict[str, str]:
        text = json.dumps(entry)
        return {name: content for name, content in self.former.files.items() if f"/{name}" in text}


def shared_models(gateway: Served, referring: Iterable[Referring], former: Former) -> SharedModels:
    """Services that have an entry go before those that have none, older ones before younger ones."""
    known = {one.name: one for one in referring}
    had = {name for name in known if cluster_name(gateway.namespace, name) in former.entries}
    holders = {
        model: name
        for name in had
        for model in former.entries[cluster_name(gateway.namespace, name)]["served_model_name"]
        if model in known[name].names or known[name].reason
    }
    selection = _Selection(gateway, former, holders)
    ordered = sorted(known.values(), key=lambda one: (one.name not in had, one.created, one.name))
    services = {one.name: selection.add(one) for one in ordered}
    entries = [selection.entries[name] for name in sorted(selection.entries)]
    return SharedModels(
        models_file=json.dumps({"models": entries}, indent=1),
        files=selection.files,
        services=tuple(services[name] for name in sorted(services)),
        redis_ports=tuple(sorted({port for one in known.values() for port in _external_ports(one.service)})),
    )


def _bytes_of(files: Mapping[str, str]) -> int:
    return sum(len(content) * 3 // 4 - content.count("=", -2) for content in files.values())


def _external_ports(service: Served | None) -> list[int]:
    external = service.spec.redis.external if service is not None else None
    return [] if external is None else redis_ports(external)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayPlan(Changes):
    """Of a ModelGateway: at the end, its status is written."""

    status: ModelGatewayStatus


def make_gateway_plan(
    gateway: Served,
    observed: Observed,
    models: SharedModels,
    before: ModelGatewayStatus,
    generation: int,
    settings: OperatorSettings,
) -> GatewayPlan:
    """`before`: the status as it is."""
    problems = shared_problems(gateway, settings.apis, settings.allow)
    if problems:
        return refused_gateway(problems, observed, before, generation)
    if observed.foreign:
        return GatewayPlan(status=_status(before, [name_taken(observed.foreign, "ModelGateway")], observed, generation))
    patched, unfit = with_patches(gateway, _manifests(gateway, models, settings), settings)
    if unfit:
        shown = [text.replace("spec.gateway.", "spec.") for text in unfit]
        return refused_gateway(shown, observed, before, generation)
    status = _status(before, _conditions(gateway, observed, models), observed, generation)
    return GatewayPlan(
        secrets=generated_secrets(gateway, observed),
        apply=tuple(patched),
        delete=_superfluous(observed, patched),
        status=_with_services(status, gateway, observed, models),
    )


def refused_gateway(
    problems: list[str], observed: Observed, before: ModelGatewayStatus, generation: int
) -> GatewayPlan:
    """Of a spec that cannot be served: nothing is changed, and the status reports why."""
    return GatewayPlan(status=_status(before, [invalid(problems)], observed, generation))


def _manifests(gateway: Served, models: SharedModels, settings: OperatorSettings) -> list[Manifest]:
    # Pods wait for both; so they come first.
    manifests = [models_config_map(gateway, models.models_file), fleets_secret(gateway, models.files)]
    if gateway.spec.redis.managed is not None:
        manifests += [redis_deployment(gateway), redis_service(gateway)]
    manifests += [gateway_deployment(gateway), gateway_service(gateway)]
    route = http_route(gateway)
    manifests += [route] if route is not None else []
    manifests += pod_monitors(gateway)
    manifests += disruption_budgets(gateway, settings, ())
    manifests += network_policies(gateway, settings, models.redis_ports)
    return manifests


def _superfluous(observed: Observed, manifests: Iterable[Manifest]) -> tuple[Ref, ...]:
    kept = set(map(Ref.of, manifests))
    return tuple(sorted(observed.owned - kept, key=lambda ref: (ref.kind, ref.name)))


def _conditions(gateway: Served, observed: Observed, models: SharedModels) -> list[Condition]:
    deployment = observed.deployment(gateway_name(gateway.name))
    conditions = [
        condition(VALID, True, "SpecAccepted"),
        secrets_available(gateway, observed, SECRETS_AVAILABLE),
        available(GATEWAYS_READY, deployment, gateway.spec.gateway.replicas, "gateway"),
        _services_served(models.services),
        *arguments_accepted(gateway, observed, ""),
        degraded(observed, ""),
    ]
    if gateway.spec.redis.managed is not None:
        conditions.append(redis_ready(gateway, observed))
    return conditions


OPTIONAL = frozenset({ARGUMENTS_ACCEPTED, REDIS_READY})
"""Conditions that depend on the spec: those of a former spec are removed."""


def _services_served(services: Sequence[ReferringService]) -> Condition:
    bad = [one for one in services if one.reason]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return condition(SERVICES_SERVED, False, bad[0].reason, f"ModelService {bad[0].name!r}: {bad[0].message}{more}")
    if not services:
        return condition(SERVICES_SERVED, True, "NoServices", "no ModelService refers to it yet")
    return condition(SERVICES_SERVED, True, "AllServed", f"{len(services)} services")


def _status(
    before: ModelGatewayStatus, conditions: list[Condition], observed: Observed, generation: int
) -> ModelGatewayStatus:
    found = {one.type for one in conditions} | {READY}
    if SERVICES_SERVED in found:
        found |= OPTIONAL
    # Else the spec is invalid, and nothing new is known about what runs.
    everything = [*conditions, *(one for one in before.conditions if one.type not in found)]
    missing = first_missing(everything, NEEDED)
    whole = missing or condition(READY, True, "GatewaysReady", "gateways are ready")
    timed = settled([whole, *everything], before.conditions, generation=generation, now=observed.now)
    return msgspec.structs.replace(
        before, observed_generation=generation, conditions=timed, error=_error(timed) or status_error(timed)
    )


def _error(conditions: Iterable[Condition]) -> str:
    """A refused service is shown only if nothing is wrong with the gateways themselves."""
    by_type = {one.type: one for one in conditions}
    served = by_type.get(SERVICES_SERVED)
    wrong = any((one.type, one.status) in ((VALID, "False"), (DEGRADED, "True")) for one in by_type.values())
    if wrong or served is None or served.status == "True":
        return ""
    return f"{served.reason}: {served.message}"[:80]


def _with_services(
    status: ModelGatewayStatus, gateway: Served, observed: Observed, models: SharedModels
) -> ModelGatewayStatus:
    deployment = observed.deployment(gateway_name(gateway.name))
    ready = 0 if deployment is None else deployment.ready
    return msgspec.structs.replace(
        status,
        ready=f"{ready}/{gateway.spec.gateway.replicas}",
        endpoint=endpoint_of(gateway),
        served=sum(one.served for one in models.services),
        refused=sum(not one.served for one in models.services),
        services=_shown(models.services),
    )


def _shown(services: Sequence[ReferringService]) -> list[ReferringService]:
    """By name; if there are too many, those that are served come first."""
    chosen = sorted(services, key=lambda one: (not one.served, one.name))[:MAX_SHOWN]
    return sorted(chosen, key=lambda one: one.name)
