"""`tandem k8s …`, also `kubectl tandem …`: inspects and controls deployments on Kubernetes.

kubectl runs any program `kubectl-tandem` on PATH as `kubectl tandem`. Only argparse is imported here, so that `--help`
is instant.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem_services.cli.chat.command import add_conversation
from tandem_services.cli.entry import TeachingParser, run_command
from tandem_services.cli.flags import add_api_key, positive_float

ROLES = ("prefill", "decode", "both")

EXAMPLES = """\
examples:
  {prog} status                        every ModelService of the namespace, as a tree
  {prog} status llama -w               one of them, refreshed until Ctrl-C
  {prog} roles llama                   role and load of each worker
  {prog} flip llama-decode-5d8f-x2k9j prefill
  {prog} queue llama                   waiting requests in gateways and on workers, and their waits
  {prog} explain chatcmpl-4f1c         workers of a request, reasons and alternatives
  {prog} adapters llama                LoRA adapters, their digests and workers
  {prog} caches                        weights on volumes, their progress and services
  {prog} decisions llama               last decisions of the autoscaler, with reasons
  {prog} scale llama --prefill 2 --decode 4
  {prog} drain llama-decode-5d8f-x2k9j
  {prog} chat llama                    chat with it, through a port-forward

Cluster, context and namespace as in kubectl: KUBECONFIG, --context, -n. Pods are reached by port-forward.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    prog = "tandem k8s"
    parser = commands.add_parser(
        "k8s",
        help="inspect and control deployments on Kubernetes (also `kubectl tandem`)",
        description=DESCRIPTION,
        epilog=EXAMPLES.format(prog=prog),
    )
    _add_commands(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kubectl-tandem`; returns the exit status."""
    return run_command(build_plugin_parser, argv)


def build_plugin_parser() -> argparse.ArgumentParser:
    prog = "kubectl tandem"
    parser = TeachingParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EXAMPLES.format(prog=prog),
    )
    _add_commands(parser)
    return parser


DESCRIPTION = "Inspect and control ModelServices and their workers on Kubernetes."


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=TeachingParser)
    status = _command(commands, "status", "ModelServices as trees: conditions, roles, revisions, pods", _status)
    _name(status, optional=True)
    _all_namespaces(status)
    status.add_argument(
        "-o",
        "--output",
        choices=("wide", "json", "yaml"),
        metavar="FORMAT",
        help="wide (nodes, restarts), json or yaml",
    )
    _watch(status)
    status.add_argument(
        "--no-figures",
        action="store_true",
        help="show only data of the API server, not of the pods (no port-forward)",
    )
    roles = _command(commands, "roles", "workers with their declared and their current role", _roles)
    _name(roles, optional=True)
    _watch(roles)
    flip = _command(commands, "flip", "change the role of a running worker; its requests migrate or finish", _flip)
    _pod(flip)
    flip.add_argument("role", choices=ROLES, help="new role, until the worker restarts")
    queue = _command(commands, "queue", "requests that wait in gateways and on workers", _queue)
    _name(queue, optional=True)
    _watch(queue)
    drain = _command(
        commands, "drain", "evict one pod: its requests migrate or finish; another pod replaces it", _drain
    )
    _pod(drain)
    drain.add_argument("--no-wait", action="store_true", help="return before the pod is deleted")
    explain = _command(
        commands, "explain", "workers of a request, the reasons for them, and the alternatives", _explain
    )
    explain.add_argument(
        "request_id", metavar="REQUEST_ID", help="`id` of the response, X-Request-Id, or the client's request id"
    )
    explain.add_argument("--service", metavar="NAME", help="query only its gateways (default: all of the namespace)")
    explain.add_argument("-o", "--output", choices=("json",), metavar="FORMAT", help="json: the gateway's JSON")
    add_api_key(explain)
    decisions = _command(commands, "decisions", "the autoscaler's last ten decisions, with reasons", _decisions)
    _name(decisions, optional=True)
    adapters = _command(commands, "adapters", "LoRA adapters with their sources, digests and workers", _adapters)
    _name(adapters, optional=True)
    _watch(adapters)
    _watch(_command(commands, "caches", "ModelCaches with progress, commit and the services that use them", _caches))
    chat = _command(commands, "chat", "chat with a ModelService through a port-forward to its gateway", _chat)
    _name(chat, optional=False)
    add_conversation(chat)
    scale = _command(commands, "scale", "change the number of workers of one role or both", _scale)
    _name(scale, optional=False)
    for role in ("prefill", "decode"):
        scale.add_argument(f"--{role}", type=_replicas, metavar="N", help=f"{role} workers")


def _command(
    commands: "argparse._SubParsersAction[TeachingParser]",
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="kubeconfig file (default: KUBECONFIG, then ~/.kube/config)"
    )
    cluster.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    cluster.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: the context's)")
    parser.set_defaults(run=run)
    return parser


def _name(parser: argparse.ArgumentParser, *, optional: bool) -> None:
    text = "ModelService (default: all of the namespace)" if optional else "ModelService"
    parser.add_argument("name", nargs="?" if optional else None, metavar="NAME", help=text)


def _pod(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pod", metavar="POD", help="worker pod of a ModelService, as listed by `status`")


def _all_namespaces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="all namespaces")


def _watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--watch", action="store_true", help="refresh until Ctrl-C")
    parser.add_argument(
        "--every",
        type=positive_float,
        default=2.0,
        metavar="S",
        help="seconds between refreshes of --watch (default: 2)",
    )


def _replicas(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = -1
    if not 0 <= count <= 1000:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1000, got {text!r}")
    return count


def _status(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.views import show_status

    return show_status(args)


def _roles(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.views import show_roles

    return show_roles(args)


def _queue(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.views import show_queue

    return show_queue(args)


def _decisions(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.views import show_decisions

    return show_decisions(args)


def _caches(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.resources import show_caches

    return show_caches(args)


def _adapters(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.resources import show_adapters

    return show_adapters(args)


def _flip(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.actions import flip

    return flip(args)


def _drain(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.actions import drain

    return drain(args)


def _scale(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.actions import scale

    return scale(args)


def _explain(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.explain import explain

    return explain(args)


def _chat(args: argparse.Namespace) -> int:
    from tandem_services.cli.k8s.explain import chat

    return chat(args)


if __name__ == "__main__":
    sys.exit(main())
