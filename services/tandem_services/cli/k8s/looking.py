"""`status`, `roles`, `queue` and `decisions`: what is there, as tables, trees and documents."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from tandem_services.cli.k8s.cluster import Cluster, ClusterError, Object
from tandem_services.cli.k8s.figures import GatewayFigures, WorkerFigures
from tandem_services.cli.k8s.pods import ask, now, pods_of
from tandem_services.cli.k8s.table import count, seconds, table
from tandem_services.cli.k8s.tree import PodSeen, ServiceTree, gateways_of, service_tree, workers_of
from tandem_services.cli.k8s.tree_text import tree_text

CLEAR = "\033[H\033[J"


def show_status(args: argparse.Namespace) -> int:
    def draw(cluster: Cluster) -> str:
        trees = _trees(cluster, args.name, everywhere=args.all_namespaces, asked=not args.no_figures)
        if args.output in ("json", "yaml"):
            return _document([asdict(tree) for tree in trees], args.output)
        if not trees:
            return _nothing(cluster, everywhere=args.all_namespaces)
        return tree_text(trees, now=now(), wide=args.output == "wide", namespaces=args.all_namespaces)

    return _shown(args, draw)


def show_roles(args: argparse.Namespace) -> int:
    def draw(cluster: Cluster) -> str:
        return roles_text(_trees(cluster, args.name)) or _nothing(cluster)

    return _shown(args, draw)


def show_queue(args: argparse.Namespace) -> int:
    def draw(cluster: Cluster) -> str:
        return queue_text(_trees(cluster, args.name)) or _nothing(cluster)

    return _shown(args, draw)


def show_decisions(args: argparse.Namespace) -> int:
    with Cluster.of(args) as cluster:
        print(decisions_text(cluster.services(args.name)) or _nothing(cluster))
    return 0


def roles_text(trees: list[ServiceTree]) -> str:
    """ "" when there is nobody."""
    rows = [_role_row(tree, seen) for tree in trees for seen in workers_of(tree)]
    header = ("POD", "SERVICE", "MADE FOR", "SERVES", "STATE", "RUNNING", "QUEUE", "PREFILL/S", "DECODE STEP")
    return table(header, rows) if rows else ""


def queue_text(trees: list[ServiceTree]) -> str:
    """ "" when there is nobody who could have a queue."""
    rows = [
        _queue_row(tree, "gateway", seen, said)
        for tree in trees
        for seen in gateways_of(tree)
        if isinstance(said := seen.said, GatewayFigures)
    ]
    rows += [
        _queue_row(tree, said.serves, seen, said)
        for tree in trees
        for seen in workers_of(tree)
        if isinstance(said := seen.said, WorkerFigures)
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
    told = service.get("status", {}).get("decisions", [])
    title = f"{name}\n" if named else ""
    if not told:
        mode = service["spec"].get("autoscaling", {}).get("mode", "none")
        why = "nothing was decided yet" if mode == "internal" else f"spec.autoscaling.mode is {mode}"
        return f"{title}no decisions: {why}"
    rows = [
        (one["time"], one.get("role", ""), one.get("action", ""), _change(one), one.get("reason", "")) for one in told
    ]
    return title + table(("TIME", "ROLE", "ACTION", "WORKERS", "REASON"), rows)


def _change(decision: Object) -> str:
    before, after = decision.get("before"), decision.get("after")
    return f"{before} → {after}" if before != after else str(after)


def _role_row(tree: ServiceTree, seen: PodSeen) -> tuple[str, ...]:
    pod, said = seen.pod, seen.said
    known = ("-", pod.state, "-", "-", "-", "-")
    if isinstance(said, WorkerFigures):
        known = (
            said.serves,
            "Draining" if said.draining else pod.state,
            count(said.running),
            count(said.waiting),
            count(said.prefill_tokens_per_s),
            seconds(said.decode_step_s),
        )
    return (pod.name, tree.name, pod.role, *known)


def _queue_row(tree: ServiceTree, role: str, seen: PodSeen, said: GatewayFigures | WorkerFigures) -> tuple[str, ...]:
    tokens = "-" if said.waiting_tokens is None else count(said.waiting_tokens)
    running, waiting = count(said.running), count(said.waiting)
    return (seen.pod.name, tree.name, role, running, waiting, tokens, seconds(said.oldest_wait_s))


def _silent(seen: PodSeen) -> bool:
    return seen.pod.ready and not isinstance(seen.said, GatewayFigures | WorkerFigures)


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


def _shown(args: argparse.Namespace, draw: Callable[[Cluster], str]) -> int:
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
