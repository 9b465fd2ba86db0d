"""`adapters` and `caches`: LoRA adapters and ModelCaches, from statuses as the operator writes them. No pod is read."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from tandem_engine.base.logs import escape
from tandem_services.cli.k8s.cluster import Cluster, ClusterError, Object
from tandem_services.cli.k8s.views import show
from tandem_services.cli.text.tables import table

ADAPTERS_HEADER = ("ADAPTER", "SERVICE", "STATE", "FROM", "SOURCE", "DIGEST", "PREFILL", "DECODE", "NOTE")


def show_adapters(args: argparse.Namespace) -> int:
    return show(args, lambda cluster: adapters_table(*_read(cluster, args.name)))


def adapters_table(services: Sequence[Object], model_adapters: Sequence[Object]) -> str:
    """Adapters of `services`, then ModelAdapters that no service serves."""
    rows = [row for service in services for row in _served(service)]
    rows += [row for one in model_adapters for row in _refused(one)]
    if not rows:
        return "no adapters: list them in spec.adapters of a ModelService, or apply ModelAdapters (docs/adapters.md)"
    return table(ADAPTERS_HEADER, rows)


def _read(cluster: Cluster, name: str | None) -> tuple[list[Object], list[Object]]:
    services = cluster.services(name)
    try:
        found = cluster.model_adapters(cluster.namespace)
    except ClusterError as error:
        # A cluster with the CRDs of a release without this kind.
        if error.status != 404:
            raise
        found = []
    return services, [one for one in found if name in (None, one["spec"]["serviceName"])]


def _served(service: Object) -> Iterator[tuple[str, ...]]:
    for one in service.get("status", {}).get("adapters", ()):
        owner = one.get("modelAdapter", "")
        yield (
            one["name"],
            service["metadata"]["name"],
            one.get("state", "Pending"),
            f"ModelAdapter {owner}" if owner else "spec",
            one.get("source", "") or "-",
            one.get("digest", "") or "-",
            str(one.get("prefill", 0)),
            str(one.get("decode", 0)),
            _adapter_note(one),
        )


def _adapter_note(adapter: dict[str, Any]) -> str:
    failed = [f"{one['name']}: {one['reason']}" for one in adapter.get("failed", ())]
    if (more := adapter.get("failedWorkers", 0) - len(failed)) > 0:
        failed.append(f"and {more} more workers")
    return escape("; ".join(failed) or adapter.get("message", ""))


def _refused(one: Object) -> Iterator[tuple[str, ...]]:
    conditions = {each["type"]: each for each in one.get("status", {}).get("conditions", ())}
    accepted = conditions.get("Accepted")
    if accepted is not None and accepted["status"] == "True":
        return
    spec, name = one["spec"], one["metadata"]["name"]
    claim = spec["source"]["claim"]
    yield (
        spec.get("name", name),
        spec["serviceName"],
        accepted["reason"] if accepted is not None else "Pending",
        f"ModelAdapter {name}",
        f"claims/{claim['claimName']}/{claim.get('path', '')}".rstrip("/"),
        *("-", "-", "-"),
        accepted.get("message", "") if accepted is not None else "the operator has not seen it yet",
    )


CACHES_HEADER = ("CACHE", "MODEL", "REVISION", "STATE", "PROGRESS", "SIZE", "RATE", "COMMIT", "SERVICES", "NOTE")


def show_caches(args: argparse.Namespace) -> int:
    return show(args, lambda cluster: caches_table(_caches(cluster), cluster.services()))


def caches_table(caches: Sequence[Object], services: Sequence[Object]) -> str:
    """One row for each of `caches`."""
    if not caches:
        return "no model caches: apply a ModelCache (docs/model-cache.md)"
    return table(CACHES_HEADER, [_row(one, services) for one in caches])


def _caches(cluster: Cluster) -> list[Object]:
    try:
        return cluster.model_caches(cluster.namespace)
    except ClusterError as error:
        # A cluster with the CRDs of a release without this kind.
        if error.status != 404:
            raise
        return []


def _row(cache: Object, services: Sequence[Object]) -> tuple[str, ...]:
    name, status, source = cache["metadata"]["name"], cache.get("status", {}), cache["spec"]["source"]["huggingFace"]
    users = [one["metadata"]["name"] for one in services if _cache_of(one) == name]
    rate = status.get("bytesPerSecond", 0)
    return (
        name,
        source["id"],
        source.get("revision", "main"),
        status.get("state", "Pending"),
        status.get("progress", "") or "-",
        status.get("size", "") or "-",
        f"{rate / 1e6:.1f} MB/s" if rate else "-",
        status.get("commit", "")[:12] or "-",
        ", ".join(users) or "-",
        _cache_note(status),
    )


def _cache_of(service: Object) -> str:
    return str(service["spec"]["model"].get("cacheRef", {}).get("name", ""))


def _cache_note(status: Object) -> str:
    """Why it is not ready, or the file that arrives."""
    failed = next((one for one in status.get("conditions", ()) if one["type"] == "Failed"), None)
    if failed is not None and failed["status"] == "True":
        return f"{failed['reason']}: {failed.get('message', '')}"
    return str(status.get("currentFile", "") or status.get("error", ""))
