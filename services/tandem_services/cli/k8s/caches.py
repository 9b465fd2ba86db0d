"""`caches`: ModelCaches and the ModelServices that name them, from statuses as the operator writes them."""

import argparse
from collections.abc import Sequence

from tandem_services.cli.k8s.cluster import Cluster, ClusterError, Object
from tandem_services.cli.k8s.views import show
from tandem_services.cli.text.tables import table

HEADER = ("CACHE", "MODEL", "REVISION", "STATE", "PROGRESS", "SIZE", "RATE", "COMMIT", "SERVICES", "NOTE")


def show_caches(args: argparse.Namespace) -> int:
    return show(args, lambda cluster: caches_table(_caches(cluster), cluster.services()))


def caches_table(caches: Sequence[Object], services: Sequence[Object]) -> str:
    """One row for each of `caches`."""
    if not caches:
        return "no model caches: apply a ModelCache (docs/model-cache.md)"
    return table(HEADER, [_row(one, services) for one in caches])


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
        _note(status),
    )


def _cache_of(service: Object) -> str:
    return str(service["spec"]["model"].get("cacheRef", {}).get("name", ""))


def _note(status: Object) -> str:
    """Why it is not ready, or the file that arrives."""
    failed = next((one for one in status.get("conditions", ()) if one["type"] == "Failed"), None)
    if failed is not None and failed["status"] == "True":
        return f"{failed['reason']}: {failed.get('message', '')}"
    return str(status.get("currentFile", "") or status.get("error", ""))
