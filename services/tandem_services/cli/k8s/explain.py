"""`explain` and `chat`: the commands that query gateways, through a port-forward."""

import argparse
import json
import sys

import httpx

from tandem_engine.base.logs import quoted
from tandem_operator.builders.naming import GATEWAY_LABEL, MANAGED, SERVICE_LABEL
from tandem_services.cli.chat.command import converse
from tandem_services.cli.flags import key_headers
from tandem_services.cli.k8s.cluster import CONNECT_S, Cluster, Object, pod_client
from tandem_services.cli.k8s.pods import (
    ADMIN_PORT,
    COMPONENT_LABEL,
    GATEWAY,
    HTTP_PORT,
    Pod,
    runs,
)
from tandem_services.cli.text.explanation import explain_text
from tandem_services.common.errors import RemoteError

TOKEN_S = 120.0
"""Between two tokens of an answer, and before the first."""


def explain(args: argparse.Namespace) -> int:
    headers = key_headers(args)
    with Cluster.of(args) as cluster:
        gateways = _gateways(cluster, args.service)
        errors = []
        for pod in gateways:
            try:
                with pod_client(cluster.access, pod, ADMIN_PORT, headers=headers) as client:
                    response = client.get(f"/requests/{args.request_id}/explain")
            except (httpx.HTTPError, httpx.InvalidURL, LookupError) as error:
                errors.append(f"{pod['metadata']['name']}: {error}")
                continue
            if response.is_success:
                record = response.json()
                print(json.dumps(record, indent=2) if args.output == "json" else explain_text(record))
                return 0
            if response.status_code in (401, 403):
                raise RemoteError(
                    f'{pod["metadata"]["name"]} requires a key with "admin": true: set --api-key or TANDEM_API_KEY'
                )
    for message in errors:
        print(f"not queried: {message}", file=sys.stderr)
    print(
        f"none of {len(gateways) - len(errors)} gateways has {quoted(args.request_id)}: each keeps its own "
        "last few thousand requests, since its start",
        file=sys.stderr,
    )
    return 1


def chat(args: argparse.Namespace) -> int:
    headers = key_headers(args)
    with Cluster.of(args) as cluster:
        [service] = cluster.services(args.name)
        if _shared_gateway(service):
            # Others behind the same gateways have models, too.
            args.model = args.model or service["spec"].get("servedModelName", args.name)
        ready = [pod for pod in _gateways(cluster, args.name) if Pod.of(pod).ready]
        if not ready:
            raise RemoteError(f"no gateway of {args.name} is ready: `tandem k8s status {args.name}` shows the reason")
        try:
            with pod_client(cluster.access, ready[0], HTTP_PORT, headers=headers) as client:
                client.timeout = httpx.Timeout(TOKEN_S, connect=CONNECT_S)
                return converse(client, args)
        except (httpx.HTTPError, LookupError) as error:
            raise RemoteError(f"the gateway {ready[0]['metadata']['name']} does not answer: {error}") from error


def _gateways(cluster: Cluster, service: str | None) -> list[Object]:
    """Those that run. Raises `RemoteError` when there is none."""
    owner = MANAGED if service is None else _owner(cluster, service)
    pods = [pod for pod in cluster.pods(cluster.namespace, f"{COMPONENT_LABEL}={GATEWAY},{owner}") if runs(pod)]
    if not pods:
        of = "" if service is None else f" of {service}"
        raise RemoteError(f"no gateway{of} runs in namespace {cluster.namespace} (-n NAME)")
    return pods


def _owner(cluster: Cluster, name: str) -> str:
    """Selects the gateways of a ModelService: its own, or those of its ModelGateway. Raises `RemoteError`."""
    [service] = cluster.services(name)
    shared = _shared_gateway(service)
    return f"{GATEWAY_LABEL}={shared}" if shared else f"{SERVICE_LABEL}={name}"


def _shared_gateway(service: Object) -> str:
    """The ModelGateway to which a ModelService refers; empty without."""
    name: str = service["spec"].get("gatewayRef", {}).get("name", "")
    return name
