"""`tandem router`: the gateway's router on its own, for other front ends and for Inference Gateways. Needs no torch."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import allow_many_descriptors, keep_files_private
from tandem_services.cli.entry import teach
from tandem_services.cli.flags import (
    add_allowed_hosts,
    add_deployment,
    add_listen_host,
    add_local_prefill,
    add_log_format,
    add_router_policy,
    add_special_tokens,
    model_folder,
    non_negative_float,
    port_number,
    positive_float,
)
from tandem_services.cli.parsing.flag_table import Sources
from tandem_services.common.settings import FLEET_MODEL, read_settings

if TYPE_CHECKING:
    from tandem_services.router_server.config import TokenizedModel


COMMON = (
    *("--model", "--host", "--port", "--grpc-port", "--redis-url", "--cluster", "--curve-keys", "--gateway"),
    *("--api-keys", "--token-file", "--router-policy", "--config", "--print-config"),
)
"""Flags that `--help` shows."""

OF_PODS = frozenset(("TANDEM_HOST",))
"""The address that others reach this process at, which is not the one that it listens on."""

EXAMPLES = """\
examples:
  tandem router --redis-url redis://127.0.0.1:6379

  where to send a prompt; what it reserves counts until it is released
    curl localhost:8100/v1/choose --json '{"model": "tandem-mini", "prompt": "Once upon a time", "max_tokens": 64}'
    curl localhost:8100/v1/choose --json '{"model": "tandem-mini", "token_ids": [5, 6, 7], "priority": -1}'
    curl localhost:8100/v1/release --json '{"reservation": "9f3c..."}'
    curl localhost:8100/v1/workers
    curl localhost:8100/v1/choices/9f3c...

  the same over gRPC
    grpcurl -plaintext localhost:9002 describe tandem.router.v1.Router
    grpcurl -plaintext -d '{"model": "tandem-mini", "text": "Once upon a time"}' \\
      localhost:9002 tandem.router.v1.Router/Choose

  endpoint picker of an Inference Gateway, whose InferencePool are the Tandem gateways of a headless Service
    tandem router --redis-url redis://redis:6379 --host 0.0.0.0 --gateway tandem-gateways:8000 \\
      --token-file /etc/tandem/router-token --tls-cert tls.crt --tls-key tls.key
    grpcurl -insecure -d '{"service": "envoy.service.ext_proc.v3.ExternalProcessor"}' \\
      localhost:9002 grpc.health.v1.Health/Check

docs/routing.md ("Other front ends") describes fields, protocol and limits.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "router",
        help="serve route decisions to other front ends and to Inference Gateways",
        description="Select workers for requests as the gateway does, with the same Redis, prices and policies, and "
        "return them to front ends over HTTP (JSON) and gRPC; pick endpoints for an Inference Gateway (Envoy external "
        "processing, Gateway API Inference Extension).",
        epilog=EXAMPLES,
    )
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model",
        action="append",
        metavar="[NAME[,ALIAS]=]PATH",
        help="checkpoint directory with the tokenizer, and the names that clients use (default: the directory's); "
        "NAME=fleet: the workers of this name send the tokenizer; repeatable (default: the bundled model). Token ids "
        "are accepted for any model",
    )
    _add_apis(parser.add_argument_group("APIs"))
    group = parser.add_argument_group("Inference Gateway")
    group.add_argument(
        "--gateway",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="Tandem gateway as endpoint of an Inference Gateway; a name, such as that of a headless Service, stands "
        "for all of its addresses; repeatable (default: the endpoints that the Inference Gateway names)",
    )
    group.add_argument(
        "--api-keys",
        type=Path,
        metavar="PATH",
        help="key file of the gateways, to determine the tenants of an Inference Gateway's requests (default: none)",
    )
    group = parser.add_argument_group("routing")
    add_local_prefill(group)
    add_router_policy(group)
    add_special_tokens(group)
    group.add_argument(
        "--reservation-ttl",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="seconds after which a reservation that was not released expires (default: 600)",
    )
    add_deployment(parser)
    observability = parser.add_argument_group("logs and traces")
    add_log_format(observability)
    teach(parser, common=COMMON, check=check, serves=False, sources=Sources(not_variables=OF_PODS))
    parser.set_defaults(run=run)


def _add_apis(group: argparse._ArgumentGroup) -> None:
    add_listen_host(group)
    group.add_argument("--port", type=port_number, default=8100, help="port of the HTTP API (default: 8100)")
    group.add_argument(
        "--grpc-port",
        type=port_number,
        default=9002,
        metavar="PORT",
        help="port of the gRPC API and of external processing (default: 9002)",
    )
    add_allowed_hosts(group, what="requests may be for")
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with a token that front ends must send as Authorization: Bearer TOKEN; changes are applied "
        "while it runs. External processing and health need none (default: no token required)",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate of the gRPC port, PEM")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM (default: no TLS)")
    group.add_argument(
        "--drain-notice",
        type=non_negative_float,
        default=1.0,
        metavar="S",
        help="seconds that /ready is false after SIGTERM before the ports close (default: 1)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse what the router would not start with. Raises `ConfigError`."""
    _models(args.model or [""])


def run(args: argparse.Namespace) -> int:
    from tandem_engine.base.logs import LogFormat
    from tandem_services.common.redis_client import RedisAddress
    from tandem_services.router.policies import PolicyNames
    from tandem_services.router_server.config import RouterServerConfig
    from tandem_services.router_server.serve import serve

    keep_files_private()
    allow_many_descriptors()
    return serve(
        RouterServerConfig(
            models=_models(args.model or [""]),
            host=args.host,
            allowed_hosts=tuple(args.allowed_hosts),
            port=args.port,
            grpc_port=args.grpc_port,
            gateways=tuple(args.gateway),
            redis=RedisAddress(url=args.redis_url, password_file=args.redis_password_file),
            cluster=args.cluster,
            curve_keys=args.curve_keys,
            api_keys=args.api_keys,
            token_file=args.token_file,
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
            local_prefill_tokens=args.local_prefill_tokens,
            policies=PolicyNames.parse(args.router_policy),
            parse_special_tokens=args.parse_special_tokens,
            reservation_ttl_s=args.reservation_ttl,
            drain_notice_s=args.drain_notice,
            log_format=LogFormat(args.log_format),
            log_level=read_settings().log_level,
        )
    )


def _models(given: list[str]) -> "tuple[TokenizedModel, ...]":
    """ "" is the bundled model. Raises `ConfigError`."""
    from tandem_services.router_server.config import TokenizedModel

    models: list[TokenizedModel] = []
    taken: set[str] = set()
    for text in given:
        listed, equals, path = text.rpartition("=")
        folder = None if path == FLEET_MODEL else model_folder(path or None)
        if folder is None and not equals:
            raise ConfigError(f"--model {text}: give the name of its workers, as in NAME={FLEET_MODEL}")
        names = tuple(listed.split(",")) if equals or folder is None else (folder.name,)
        if "" in names or taken.intersection(names) or len({*names}) < len(names):
            raise ConfigError(f"--model {text}: every model needs unique names, as in NAME,ALIAS=PATH")
        taken.update(names)
        models.append(TokenizedModel(names, folder))
    return tuple(models)
