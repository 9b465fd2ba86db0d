"""The adapters of one worker, or of the workers of a gateway, as a table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem_engine.base.logs import escape
from tandem_services.cli.text.tables import table

HEADER = ("ADAPTER", "DIGEST", "RANK", "STATE", "NOTE")
FLEET_HEADER = ("ADAPTER", "DIGEST", "RANK", "STATE", "IN MEMORY OF", "NOTE")


def adapters_table(report: Mapping[str, Any]) -> str:
    """`report` as `GET /adapters` of a worker answers it, or `GET /v1/adapters` of a gateway."""
    fleet = "data" in report
    if not fleet and report["memory"] is None:
        return "its engine is not ready: GET /ready says what it waits for"
    rows = list(_rows_of_fleet(report["data"]) if fleet else _rows(report))
    return table(FLEET_HEADER if fleet else HEADER, rows) if rows else "no adapters"


def _rows_of_fleet(adapters: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for each in adapters:
        failed = [f"{worker}: {escape(reason)}" for worker, reason in sorted(each.get("failed", {}).items())]
        state = (
            "registered" if each["registered"] and each["requested"] else "served" if each["requested"] else "former"
        )
        workers = ", ".join(each["workers"]) or "-"
        yield (each["name"], each["digest"], str(each["rank"]), state, workers, "; ".join(failed))


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    memory = report["memory"]
    resident, failed = set(memory["resident"]), memory["failed"]
    reasons = {failure["digest"]: escape(failure["reason"]) for failure in failed}
    named = sorted(report["adapters"], key=lambda adapter: adapter["name"])
    for adapter in named:
        digest = adapter["digest"]
        state = "in memory" if digest in resident else "failed" if digest in reasons else "not in memory"
        yield (adapter["name"], digest, str(adapter["rank"]), state, reasons.get(digest, ""))
    digests = {adapter["digest"] for adapter in named}
    for digest in sorted(resident - digests):
        yield ("-", digest, "-", "in memory", "loaded for requests; this worker has no name for it")
    for failure in failed:
        if failure["digest"] not in digests:
            yield (failure["name"], failure["digest"], "-", "failed", reasons[failure["digest"]])
