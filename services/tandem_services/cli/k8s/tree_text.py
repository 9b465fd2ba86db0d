"""A `ServiceTree` as text for people."""

from collections.abc import Iterator
from datetime import datetime

from tandem_operator.planning.conditions import AUTOSCALING_ACTIVE, DEGRADED, PROGRESSING
from tandem_services.cli.k8s.figures import GatewayFigures, WorkerFigures
from tandem_services.cli.k8s.pods import Pod, Said
from tandem_services.cli.k8s.table import age, count, percent, table
from tandem_services.cli.k8s.tree import ConditionSeen, PodSeen, RoleSeen, ServiceTree, gateways_of

HEADER = ("MODELSERVICE", "STATE", "SERVES", "RUNNING", "QUEUE", "KV", "AGE", "NOTE")
WIDE = ("NODE", "RESTARTS")

NEUTRAL = (PROGRESSING, AUTOSCALING_ACTIVE)
"""Conditions that are no better true than false."""

Row = tuple[str, ...]
"""A pod, with all columns, or a name and a text."""


def tree_text(trees: list[ServiceTree], *, now: datetime, wide: bool = False, namespaces: bool = False) -> str:
    """All of them in one table."""
    rows = [row for tree in trees for row in _service(tree, now, namespaces=namespaces)]
    header = HEADER[:-1] + WIDE + HEADER[-1:] if wide else HEADER
    return table(header, [_fitted(row, wide=wide) for row in rows])


def _fitted(row: Row, *, wide: bool) -> Row:
    """Rows of pods are made wide: node and restarts, then the note."""
    return row if wide or len(row) < len(HEADER) else row[: len(HEADER) - 1] + row[-1:]


def _service(tree: ServiceTree, now: datetime, *, namespaces: bool) -> Iterator[Row]:
    name = f"{tree.namespace}/{tree.name}" if namespaces else tree.name
    note = tree.endpoint if tree.observed else "the operator has not seen the latest change yet"
    yield (name, f"{_ready(tree)}  {note}")
    branches: list[list[Row]] = [[_condition(one)] for one in tree.conditions if one.type != "Ready"]
    branches += [list(_role(role, now)) for role in tree.roles]
    branches += [list(_gateways(gateways_of(tree), now))]
    branches += [[_pod(one, now)] for one in tree.others if one not in gateways_of(tree)]
    yield from _joined([branch for branch in branches if branch])


def _ready(tree: ServiceTree) -> str:
    ready = next((one for one in tree.conditions if one.type == "Ready"), None)
    if ready is None:
        return "Unknown"
    return "Ready" if ready.status == "True" else ready.reason


def _condition(condition: ConditionSeen) -> Row:
    good = "False" if condition.type == DEGRADED else "True"
    mark = "?" if condition.status == "Unknown" else "✓" if condition.status == good else "✗"
    if condition.type in NEUTRAL:
        mark = "•"
    note = f"{condition.reason}: {condition.message}" if condition.message else condition.reason
    stale = " (of an older spec)" if condition.stale else ""
    return (f"{mark} {condition.type}", note + stale)


def _role(role: RoleSeen, now: datetime) -> Iterator[Row]:
    yield (role.role, f"{role.ready}/{role.wanted} ready")
    branches = []
    for revision in role.revisions:
        pods = [_worker(one, now) for one in revision.pods]
        share = f"{percent(revision.share)} of new requests"
        branches.append([(f"revision {revision.name or '?'}", share), *_joined(pods)])
    yield from _joined(branches)


def _worker(seen: PodSeen, now: datetime) -> list[Row]:
    """With the other pods that it is made of."""
    return [_pod(seen, now), *_joined([[_pod(one, now)] for one in seen.followers])]


def _gateways(gateways: list[PodSeen], now: datetime) -> Iterator[Row]:
    if not gateways:
        return
    ready = sum(one.pod.ready for one in gateways)
    yield ("gateway", f"{ready}/{len(gateways)} ready")
    yield from _joined([[_pod(one, now)] for one in gateways])


def _pod(seen: PodSeen, now: datetime) -> Row:
    pod, said = seen.pod, seen.said
    serves, running, queue, kv = _busy(said)
    return (
        pod.name,
        pod.state,
        serves,
        running,
        queue,
        kv,
        age(pod.age_s(now)),
        pod.node,
        str(pod.restarts),
        _note(pod, said),
    )


def _busy(said: Said | None) -> tuple[str, str, str, str]:
    """Role, running, queue and KV, as far as they are known."""
    match said:
        case WorkerFigures():
            tokens = f" ({count(said.waiting_tokens)} tokens)" if said.waiting_tokens else ""
            return said.serves, count(said.running), f"{count(said.waiting)}{tokens}", percent(said.kv_usage)
        case GatewayFigures():
            return "", count(said.running), count(said.waiting), ""
    return "", "", "", ""


def _note(pod: Pod, said: Said | None) -> str:
    notes = [pod.trouble]
    match said:
        case str():
            notes.append(f"no response: {said}")
        case WorkerFigures(draining=True):
            notes.append("draining")
        case WorkerFigures(standby=True):
            notes.append("standby: its canary has not passed yet")
        case WorkerFigures(serves=serves) if serves and serves != pod.role:
            notes.append(f"flipped from {pod.role}")
        case WorkerFigures(offered=False) if pod.ready:
            notes.append("not offered to requests")
    return "; ".join(note for note in notes if note)


def _joined(branches: list[list[Row]]) -> Iterator[Row]:
    """Each branch below the one above, with the lines that show what belongs to what."""
    for number, branch in enumerate(branches):
        last = number == len(branches) - 1
        for line, row in enumerate(branch):
            joint = ("└─ " if last else "├─ ") if line == 0 else ("   " if last else "│  ")
            yield (joint + row[0], *row[1:])
