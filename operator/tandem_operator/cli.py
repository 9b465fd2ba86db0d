"""`tandem-operator`: the command of the operator's pod."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Literal, TextIO

from pythonjsonlogger.json import JsonFormatter

from tandem_operator.controller.cluster import NoCredentialsError
from tandem_operator.controller.leader_election import ElectionConfig
from tandem_operator.controller.probes import PortTakenError
from tandem_operator.controller.runtime import RuntimeOptions, fresh_identity, run
from tandem_operator.settings import PRIVILEGES, OperatorSettings, Privilege, own_namespace

LogFormat = Literal["json", "plain"]
_FIELDS = "%(asctime)s %(levelname)s %(name)s %(message)s"
_NAMES = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"}
_TIME = "%Y-%m-%dT%H:%M:%S%z"


def configure_logging(log_format: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Send everything to one handler (stderr by default). Call once, at process start."""
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(_FIELDS, rename_fields=_NAMES, datefmt=_TIME))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf logs each reconnection, httpx each request.
    for chatty in ("kopf", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


EPILOG = """\
The operator serves every ModelService of its namespaces: it creates workers, gateway and Redis, rolls out changes pair
by pair, scales both roles by queue depth, and reports its progress in the status. See
`kubectl explain modelservice.spec`.

  tandem-operator                                   in a pod: all namespaces, credentials of its service account
  KUBECONFIG=~/.kube/config tandem-operator --no-leader-elect --log-format plain
                                                    on a laptop, against the cluster of the kubeconfig
  tandem-operator --namespaces chat,search          only two namespaces; a Role in each is sufficient

Two replicas: the leader acts. The other has the same caches and takes over when the leader releases the lease (at once)
or stops renewing it (--lease-duration). Requests of clients depend on neither.

Exit status: 0 after SIGTERM, 1 when a part of it failed (start it again), 2 for a wrong flag.
"""


def parser() -> argparse.ArgumentParser:
    """Flags and what they mean."""
    root = argparse.ArgumentParser(
        prog="tandem-operator",
        description="Reconcile the ModelServices of a Kubernetes cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _scope(root.add_argument_group("scope"))
    _privileges(root.add_argument_group("privileges of ModelServices"))
    _images(root.add_argument_group("default images"))
    _election(root.add_argument_group("leader election"))
    _process(root.add_argument_group("process"))
    return root


def _scope(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--namespaces",
        type=_names,
        default=(),
        metavar="A,B",
        help="namespaces whose ModelServices are reconciled (default: all)",
    )
    group.add_argument(
        "--operator-namespace",
        default=own_namespace(),
        metavar="NAME",
        help="namespace of the operator and its lease; workers accept commands from it (default: $POD_NAMESPACE, "
        "else "
        "tandem-system)",
    )
    group.add_argument(
        "--canary",
        choices=("on", "off"),
        default="on",
        help="require a test request through each new pair and the gateway before they count as ready. off: require "
        "only ready pods, for clusters whose pods the operator cannot reach (default: on)",
    )


def _privileges(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow",
        type=_allowed,
        default=frozenset(),
        metavar="A,B",
        help="privileges beyond the Pod Security Standard restricted: service-accounts, host-paths, "
        "privileged; and objects that the ClusterRole edit cannot create: routes (HTTPRoutes and "
        "InferencePools), monitors (PodMonitors). Every author of a ModelService gets them (default: nothing)",
    )


def _images(group: argparse._ArgumentGroup) -> None:
    defaults = OperatorSettings()
    group.add_argument(
        "--engine-image", default=defaults.engine_image, metavar="IMAGE", help="workers on CPUs (default: %(default)s)"
    )
    group.add_argument(
        "--cuda-engine-image",
        default=defaults.cuda_engine_image,
        metavar="IMAGE",
        help="workers on NVIDIA GPUs (default: %(default)s)",
    )
    group.add_argument(
        "--services-image", default=defaults.services_image, metavar="IMAGE", help="gateways (default: %(default)s)"
    )
    group.add_argument(
        "--redis-image", default=defaults.redis_image, metavar="IMAGE", help="Redis (default: %(default)s)"
    )


def _election(group: argparse._ArgumentGroup) -> None:
    defaults = ElectionConfig(identity="", namespace="")
    group.add_argument(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="act only while holding the lease; --no-leader-elect for a single operator (default: on)",
    )
    group.add_argument(
        "--lease-name", default=defaults.name, metavar="NAME", help="name of the lease (default: %(default)s)"
    )
    group.add_argument(
        "--lease-duration",
        type=float,
        default=defaults.duration_s,
        metavar="SECONDS",
        help="seconds without renewal after which the lease expires (default: %(default)g)",
    )
    group.add_argument(
        "--renew-deadline",
        type=float,
        default=defaults.renew_deadline_s,
        metavar="SECONDS",
        help="seconds without renewal after which the leader stops acting (default: %(default)g)",
    )
    group.add_argument(
        "--retry-period",
        type=float,
        default=defaults.retry_s,
        metavar="SECONDS",
        help="seconds between attempts to acquire or renew the lease (default: %(default)g)",
    )


def _process(group: argparse._ArgumentGroup) -> None:
    defaults = RuntimeOptions()
    group.add_argument(
        "--workers",
        type=_positive,
        default=defaults.workers,
        metavar="N",
        help="ModelServices reconciled concurrently (default: %(default)s)",
    )
    group.add_argument(
        "--http-host",
        default=defaults.http_host,
        metavar="HOST",
        help="address of /metrics and probes (default: %(default)s)",
    )
    group.add_argument(
        "--http-port",
        type=int,
        default=defaults.http_port,
        metavar="PORT",
        help="port of /metrics and probes; 0 picks a free one (default: %(default)s)",
    )
    group.add_argument(
        "--log-format", choices=("json", "plain"), default="json", help="format of log lines (default: %(default)s)"
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level of log lines (default: %(default)s)",
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("name at least one namespace, or leave the flag out for all")
    return names


def _allowed(text: str) -> frozenset[Privilege]:
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(names.difference(PRIVILEGES))
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PRIVILEGES)}")
    return frozenset(name for name in PRIVILEGES if name in names)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def options_of(arguments: argparse.Namespace) -> RuntimeOptions:
    """Raises `ValueError` for lease times that cannot work."""
    settings = OperatorSettings(
        engine_image=arguments.engine_image,
        cuda_engine_image=arguments.cuda_engine_image,
        services_image=arguments.services_image,
        redis_image=arguments.redis_image,
        operator_namespace=arguments.operator_namespace,
        canaries=arguments.canary == "on",
        allow=arguments.allow,
    )
    return RuntimeOptions(
        settings=settings,
        namespaces=arguments.namespaces,
        workers=arguments.workers,
        election=_election_of(arguments) if arguments.leader_elect else None,
        http_host=arguments.http_host,
        http_port=arguments.http_port,
    )


def _election_of(arguments: argparse.Namespace) -> ElectionConfig:
    return ElectionConfig(
        identity=fresh_identity(),
        namespace=arguments.operator_namespace,
        name=arguments.lease_name,
        duration_s=arguments.lease_duration,
        renew_deadline_s=arguments.renew_deadline,
        retry_s=arguments.retry_period,
    )


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    flags = parser()
    arguments = flags.parse_args(words)
    try:
        options = options_of(arguments)
    except ValueError as error:
        flags.error(str(error))
    configure_logging(arguments.log_format, arguments.log_level)
    try:
        asyncio.run(run(options))
    except (PortTakenError, NoCredentialsError) as error:
        sys.exit(f"tandem-operator: {error}")
    except asyncio.CancelledError:
        # SIGTERM before anything had begun.
        return


if __name__ == "__main__":
    main()
