"""`adapters`: LoRA adapters of ModelServices, as the operator reports them in statuses. No pod is read."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from tandem_engine.base.logs import escape
from tandem_services.cli.k8s.cluster import Cluster, ClusterError, Object
from tandem_services.cli.k8s.views import show
from tandem_services.cli.text.tables import table

HEADER = ("ADAPTER", "SERVICE", "STATE", "FROM", "SOURCE", "DIGEST", "PREFILL", "DECODE", "NOTE")


def show_adapters(args: argparse.Namespace) -> int:
    return show(args, lambda cluster: adapters_table(*_read(cluster, args.name)))


def adapters_table(services: Sequence[Object], model_adapters: Sequence[Object]) -> str:
    """Adapters of `services`, then ModelAdapters that no service serves."""
    rows = [row for service in services for row in _served(service)]
    rows += [row for one in model_adapters for row in _refused(one)]
    if not rows:
        return "no adapters: list them in spec.adapters of a ModelService, or apply ModelAdapters (docs/adapters.md)"
    return table(HEADER, rows)


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
            _note(one),
        )


def _note(adapter: dict[str, Any]) -> str:
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
