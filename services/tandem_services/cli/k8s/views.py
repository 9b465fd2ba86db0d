"""`status`, `roles`, `queue` and `decisions`: the state of services as tables, trees and documents."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from tandem_operator.planning.status import AUTOSCALING_ACTIVE, DEGRADED, PROGRESSING, VERSION_SKEW
from tandem_services.cli.k8s.cluster import Cluster, ClusterError, Object
from tandem_services.cli.k8s.pods import (
    GATEWAY,
    WORKER,
    GatewayFigures,
    Pod,
    PodAnswer,
    WorkerFigures,
    ask,
    now,
    pods_of,
)
from tandem_services.cli.text.tables import age, count, percent, seconds, table

ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionSeen:
    """One condition."""

    type: str
    status: str
    reason: str
    message: str
    stale: bool
    """It speaks of a spec that has been changed since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSeen:
    """A pod, and what it returned."""

    pod: Pod
    answer: PodAnswer | None
    """None: it was not queried."""
    followers: tuple["PodSeen", ...] = ()
    """The other pods of a worker that has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevisionSeen:
    """The workers of one role of one revision."""

    name: str
    share: float
    """Of new requests, 0 to 1."""
    pods: tuple[PodSeen, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSeen:
    """One role."""

    role: str
    wanted: int
    ready: int
    """As the pool has it; by its pods where there is no pool yet."""
    revisions: tuple[RevisionSeen, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTree:
    """One ModelService."""

    name: str
    namespace: str
    endpoint: str
    revision: str
    observed: bool
    """The operator has seen the spec as it is."""
    conditions: tuple[ConditionSeen, ...]
    roles: tuple[RoleSeen, ...]
    others: tuple[PodSeen, ...]
    """Gateways, a managed Redis, and followers whose leader is not there."""


def service_tree(
    service: Object, pools: Sequence[Object], pods: Sequence[Object], figures: Mapping[str, PodAnswer]
) -> ServiceTree:
    """`pools` and `pods`: at least those of the service; `figures`: by pod name."""
    metadata, status = service["metadata"], service.get("status", {})
    name, generation = metadata["name"], metadata.get("generation", 0)
    own = sorted((Pod.of(pod) for pod in pods), key=lambda pod: pod.name)
    seen = _grouped([PodSeen(pod=pod, answer=figures.get(pod.name)) for pod in own if pod.service == name])
    wanted = {pool["spec"]["role"]: pool for pool in pools if pool["spec"].get("serviceName") == name}
    return ServiceTree(
        name=name,
        namespace=metadata["namespace"],
        endpoint=status.get("endpoint", ""),
        revision=status.get("revision", ""),
        observed=status.get("observedGeneration") == generation,
        conditions=tuple(_condition(one, generation) for one in status.get("conditions", ())),
        roles=tuple(_role(role, service, wanted.get(role), seen) for role in ROLES),
        others=tuple(one for one in seen if one.pod.component != WORKER),
    )


def _grouped(seen: Sequence[PodSeen]) -> list[PodSeen]:
    """Followers below their leaders."""
    leaders = {one.pod.name for one in seen if one.pod.component == WORKER}
    below: dict[str, list[PodSeen]] = {}
    for one in seen:
        if one.pod.leader in leaders:
            below.setdefault(one.pod.leader, []).append(one)
    return [replace(one, followers=tuple(below.get(one.pod.name, ()))) for one in seen if one.pod.leader not in leaders]


def _condition(condition: Mapping[str, Any], generation: int) -> ConditionSeen:
    return ConditionSeen(
        type=condition["type"],
        status=condition["status"],
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        stale=0 < condition.get("observedGeneration", 0) < generation,
    )


def _role(role: str, service: Object, pool: Object | None, pods: Sequence[PodSeen]) -> RoleSeen:
    mine = [one for one in pods if one.pod.component == WORKER and one.pod.role == role]
    reported = {one["name"]: one for one in service.get("status", {}).get("revisions", ())}
    of_role = (name for name, one in reported.items() if role in one)
    names = dict.fromkeys([*of_role, *(one.pod.revision for one in mine)])
    revisions = tuple(
        RevisionSeen(
            name=name,
            share=reported.get(name, {}).get("share", 0.0),
            pods=tuple(one for one in mine if one.pod.revision == name),
        )
        for name in names
    )
    ready = sum(one.pod.ready for one in mine)
    if pool is None:
        return RoleSeen(
            role=role, wanted=service["spec"].get(role, {}).get("replicas", 1), ready=ready, revisions=revisions
        )
    status = pool.get("status", {})
    return RoleSeen(
        role=role,
        wanted=pool["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", ready),
        revisions=revisions,
    )


def gateways_of(tree: ServiceTree) -> list[PodSeen]:
    return [one for one in tree.others if one.pod.component == GATEWAY]


def workers_of(tree: ServiceTree) -> list[PodSeen]:
    return [one for role in tree.roles for revision in role.revisions for one in revision.pods]


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
    branches: list[list[Row]] = [[_condition_row(one)] for one in tree.conditions if one.type != "Ready"]
    branches += [list(_role_rows(role, now)) for role in tree.roles]
    branches += [list(_gateways(gateways_of(tree), now))]
    branches += [[_pod(one, now)] for one in tree.others if one not in gateways_of(tree)]
    yield from _joined([branch for branch in branches if branch])


def _ready(tree: ServiceTree) -> str:
    ready = next((one for one in tree.conditions if one.type == "Ready"), None)
    if ready is None:
        return "Unknown"
    return "Ready" if ready.status == "True" else ready.reason


def _condition_row(condition: ConditionSeen) -> Row:
    good = "False" if condition.type in (DEGRADED, VERSION_SKEW) else "True"
    mark = "?" if condition.status == "Unknown" else "✓" if condition.status == good else "✗"
    if condition.type in NEUTRAL:
        mark = "•"
    note = f"{condition.reason}: {condition.message}" if condition.message else condition.reason
    stale = " (of an older spec)" if condition.stale else ""
    return (f"{mark} {condition.type}", note + stale)


def _role_rows(role: RoleSeen, now: datetime) -> Iterator[Row]:
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
    pod, answer = seen.pod, seen.answer
    serves, running, queue, kv = _busy(answer)
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
        _note(pod, answer),
    )


def _busy(answer: PodAnswer | None) -> tuple[str, str, str, str]:
    """Role, running, queue and KV, as far as they are known."""
    match answer:
        case WorkerFigures():
            tokens = f" ({count(answer.waiting_tokens)} tokens)" if answer.waiting_tokens else ""
            return answer.serves, count(answer.running), f"{count(answer.waiting)}{tokens}", percent(answer.kv_usage)
        case GatewayFigures():
            return "", count(answer.running), count(answer.waiting), ""
    return "", "", "", ""


def _note(pod: Pod, answer: PodAnswer | None) -> str:
    notes = [pod.failure]
    match answer:
        case str():
            notes.append(f"no response: {answer}")
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


CLEAR = "\033[H\033[J"


def show_status(args: argparse.Namespace) -> int:
    def draw(cluster: Cluster) -> str:
        trees = _trees(cluster, args.name, everywhere=args.all_namespaces, asked=not args.no_figures)
        if args.output in ("json", "yaml"):
            return _document([asdict(tree) for tree in trees], args.output)
        if not trees:
            return _nothing(cluster, everywhere=args.all_namespaces)
        return tree_text(trees, now=now(), wide=args.output == "wide", namespaces=args.all_namespaces)

    return show(args, draw)


def show_roles(args: argparse.Namespace) -> int:
    def draw(cluster: Cluster) -> str:
        return roles_text(_trees(cluster, args.name)) or _nothing(cluster)

    return show(args, draw)


def show_queue(args: argparse.Namespace) -> int:
    def draw(cluster: Cluster) -> str:
        return queue_text(_trees(cluster, args.name)) or _nothing(cluster)

    return show(args, draw)


def show_decisions(args: argparse.Namespace) -> int:
    with Cluster.of(args) as cluster:
        print(decisions_text(cluster.services(args.name)) or _nothing(cluster))
    return 0


def roles_text(trees: list[ServiceTree]) -> str:
    """ "" when there is none."""
    rows = [_role_row(tree, seen) for tree in trees for seen in workers_of(tree)]
    header = ("POD", "SERVICE", "MADE FOR", "SERVES", "STATE", "RUNNING", "QUEUE", "PREFILL/S", "DECODE STEP")
    return table(header, rows) if rows else ""


def queue_text(trees: list[ServiceTree]) -> str:
    """ "" when no worker could have a queue."""
    rows = [
        _queue_row(tree, "gateway", seen, answer)
        for tree in trees
        for seen in gateways_of(tree)
        if isinstance(answer := seen.answer, GatewayFigures)
    ]
    rows += [
        _queue_row(tree, answer.serves, seen, answer)
        for tree in trees
        for seen in workers_of(tree)
        if isinstance(answer := seen.answer, WorkerFigures)
    ]
    silent = [seen.pod.name for tree in trees for seen in (*gateways_of(tree), *workers_of(tree)) if _silent(seen)]
    if not rows and not silent:
        return ""
    header = ("POD", "SERVICE", "ROLE", "RUNNING", "WAITING", "TOKENS", "OLDEST")
    note = f"\nnot counted, because they say nothing: {', '.join(silent)}" if silent else ""
    return table(header, rows) + note


def decisions_text(services: list[Object]) -> str:
    """ "" when there are no services."""
    several = len(services) > 1
    return "\n\n".join(_decisions(service, named=several) for service in services)


def _decisions(service: Object, *, named: bool) -> str:
    name = service["metadata"]["name"]
    status = service.get("status", {}).get("decisions", [])
    title = f"{name}\n" if named else ""
    if not status:
        mode = service["spec"].get("autoscaling", {}).get("mode", "none")
        why = "nothing was decided yet" if mode == "internal" else f"spec.autoscaling.mode is {mode}"
        return f"{title}no decisions: {why}"
    rows = [
        (one["time"], one.get("role", ""), one.get("action", ""), _change(one), one.get("reason", "")) for one in status
    ]
    return title + table(("TIME", "ROLE", "ACTION", "WORKERS", "REASON"), rows)


def _change(decision: Object) -> str:
    before, after = decision.get("before"), decision.get("after")
    return f"{before} → {after}" if before != after else str(after)


def _role_row(tree: ServiceTree, seen: PodSeen) -> tuple[str, ...]:
    pod, answer = seen.pod, seen.answer
    known = ("-", pod.state, "-", "-", "-", "-")
    if isinstance(answer, WorkerFigures):
        known = (
            answer.serves,
            "Draining" if answer.draining else pod.state,
            count(answer.running),
            count(answer.waiting),
            count(answer.prefill_tokens_per_s),
            seconds(answer.decode_step_s),
        )
    return (pod.name, tree.name, pod.role, *known)


def _queue_row(tree: ServiceTree, role: str, seen: PodSeen, answer: GatewayFigures | WorkerFigures) -> tuple[str, ...]:
    tokens = "-" if answer.waiting_tokens is None else count(answer.waiting_tokens)
    running, waiting = count(answer.running), count(answer.waiting)
    return (seen.pod.name, tree.name, role, running, waiting, tokens, seconds(answer.oldest_wait_s))


def _silent(seen: PodSeen) -> bool:
    return seen.pod.ready and not isinstance(seen.answer, GatewayFigures | WorkerFigures)


def _trees(cluster: Cluster, name: str | None, *, everywhere: bool = False, asked: bool = True) -> list[ServiceTree]:
    services = cluster.services(name, everywhere=everywhere)
    pools = {place: cluster.pools(place) for place in {service["metadata"]["namespace"] for service in services}}
    trees = []
    for service in services:
        pods = pods_of(cluster, service)
        figures = ask(cluster.access, pods) if asked else {}
        trees.append(service_tree(service, pools[service["metadata"]["namespace"]], pods, figures))
    return trees


def _nothing(cluster: Cluster, *, everywhere: bool = False) -> str:
    where = "in any namespace" if everywhere else f"in namespace {cluster.namespace} (-n NAME, -A for all)"
    return f"no ModelService {where}"


def _document(value: object, kind: str) -> str:
    if kind == "json":
        return json.dumps(value, indent=2, ensure_ascii=False)
    import yaml

    return str(yaml.safe_dump(json.loads(json.dumps(value)), sort_keys=False, allow_unicode=True)).rstrip()


def show(args: argparse.Namespace, draw: Callable[[Cluster], str]) -> int:
    """Once, or with --watch again and again: then a moment without an API server ends nothing."""
    with Cluster.of(args) as cluster:
        print(draw(cluster))
        while args.watch:
            time.sleep(args.every)
            try:
                text = draw(cluster)
            except ClusterError as error:
                text = str(error)
            print((CLEAR if sys.stdout.isatty() else "\n") + text, flush=True)
    return 0
