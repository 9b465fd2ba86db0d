"""`tandem gateway`: the OpenAI-compatible HTTP front of a deployment. Needs no torch."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.freed_memory import lasting
from tandem_engine.base.linux import allow_many_descriptors, keep_files_private
from tandem_engine.base.thread_pools import require_threads
from tandem_engine.config.flags import host_address, non_negative_int
from tandem_services.cli.entry import teach
from tandem_services.cli.flags import (
    GATEWAY_DRAIN_S,
    add_allowed_hosts,
    add_api_keys,
    add_body_memory,
    add_console,
    add_deployment,
    add_gateway_model,
    add_listen_host,
    add_local_prefill,
    add_log_format,
    add_output_parsers,
    add_queue,
    add_router_policy,
    add_special_tokens,
    add_tracing,
    milliseconds,
    model_folder,
    non_negative_float,
    percentile,
    port_number,
    positive_float,
    served_names,
    tracing_of,
)
from tandem_services.cli.parsing.flag_table import Sources
from tandem_services.common.settings import FLEET_MODEL, read_settings
from tandem_services.gateway.objectives import Objectives, SloMode

if TYPE_CHECKING:
    from tandem_services.gateway.config import ModelConfig


THREADS = 22
"""That a gateway starts next to those of its tokenizers."""

COMMON = (
    *("--model", "--served-model-name", "--models", "--host", "--port", "--allowed-hosts", "--redis-url", "--cluster"),
    *("--curve-keys", "--api-keys", "--admin-port", "--router-policy", "--config", "--print-config"),
)
"""Flags that `--help` shows."""

OF_PODS = frozenset(("TANDEM_HOST",))
"""The address that others reach this process at, which is not the one that it listens on."""

EXAMPLES = """\
examples:
  tandem gateway --redis-url redis://127.0.0.1:6379 --model ~/llama --port 8000
  tandem gateway --redis-url redis://127.0.0.1:6379 --model ~/llama --served-model-name llama gpt-4o-mini
  tandem gateway --redis-url redis://127.0.0.1:6379 --models models.json     several models (docs/multi-model.md)
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "gateway",
        help="run the OpenAI-compatible HTTP gateway",
        description="Serve /v1/models, /v1/completions, /v1/chat/completions, /v1/responses and more: tokenize, "
        "route by cached prefixes and load, stream, and resume requests on other workers when one fails.",
        epilog=EXAMPLES,
    )
    group = parser.add_argument_group("models")
    add_gateway_model(group)
    group.add_argument(
        "--models",
        type=Path,
        metavar="FILE",
        help="JSON or TOML file of several model services, instead of --model. Changes are applied while the gateway "
        "runs; other flags are defaults of its entries (docs/multi-model.md)",
    )
    group.add_argument(
        "--independent-models",
        action="store_true",
        help="open each entry of --models by itself: one that cannot be opened is tried again and keeps no other out, "
        "any may be removed, and there may be none. Usage of keys is then counted in the Redis and --cluster of these "
        "flags instead of the first entry's",
    )
    add_output_parsers(group)
    _add_api(parser.add_argument_group("API"))
    _add_administration(parser.add_argument_group("administration"))
    _add_routing(parser.add_argument_group("routing"))
    _add_cells(parser.add_argument_group("cells"))
    _add_objectives(parser.add_argument_group("latency objectives"))
    _add_queue_and_stop(parser.add_argument_group("queue and stop"))
    add_deployment(parser)
    observability = parser.add_argument_group("logs and traces")
    add_log_format(observability)
    add_tracing(observability)
    teach(parser, common=COMMON, check=check, check_flags=check_flags, sources=Sources(not_variables=OF_PODS))
    parser.set_defaults(run=run)


def _add_api(group: argparse._ArgumentGroup) -> None:
    add_listen_host(group)
    group.add_argument("--port", type=port_number, default=8000, help="port to listen on (default: 8000)")
    group.add_argument(
        "--model-root",
        default="",
        metavar="NAME",
        help="what /v1/models has as root, such as repository and commit of the model (default: the model's name)",
    )
    add_allowed_hosts(group, what="requests may be for")
    add_api_keys(group)
    group.add_argument(
        "--strict-fields",
        action="store_true",
        help="reject requests with unknown fields, by name (default: unknown fields are ignored)",
    )
    add_special_tokens(group)
    add_body_memory(group)


def _add_administration(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--admin-port",
        type=port_number,
        metavar="PORT",
        help="port of /metrics, /console, /drain and /requests/ID/explain; /metrics and /console are then not on the "
        "API's port (default: none)",
    )
    group.add_argument(
        "--admin-host",
        type=host_address,
        default=LOOPBACK,
        metavar="HOST",
        help="address of --admin-port (default: %(default)s)",
    )
    add_console(group)
    group.add_argument(
        "--processes",
        type=process_count,
        default=1,
        metavar="N",
        help="serve with N processes, at most 8, each of which uses one core; auto: one per CPU that it may use. With "
        "more than one, add --admin-port (docs/gateway-processes.md) (default: 1)",
    )
    group.add_argument("--process-place", type=Path, help=argparse.SUPPRESS)
    group.add_argument(
        "--explain-candidates",
        type=non_negative_int,
        default=100,
        metavar="N",
        help="maximum number of route decisions per second and model whose candidates and prices are recorded for "
        "explain; 0: none (default: 100)",
    )


def _add_objectives(group: argparse._ArgumentGroup) -> None:
    for objective, text in (("ttft", "for the time to the first token"), ("itl", "for the mean time between tokens")):
        group.add_argument(
            f"--slo-{objective}-ms",
            type=milliseconds,
            metavar="MS",
            help=f"objective {text}, in milliseconds, of requests that name none (default: none)",
        )
    group.add_argument(
        "--slo-admission",
        choices=[mode.value for mode in SloMode],
        default=SloMode.OBSERVE.value,
        help="observe: reject no request because of its objectives; shed: those of priority below 0 that are predicted "
        "to miss one while their workers are busy; strict: any that is predicted to take more than twice an objective "
        "while its workers are busy (default: %(default)s)",
    )
    group.add_argument(
        "--slo-percentile",
        type=percentile,
        default=0.95,
        metavar="P",
        help="share of requests that predicted latencies with their margin are for (default: %(default)s)",
    )


def _add_routing(group: argparse._ArgumentGroup) -> None:
    add_local_prefill(group)
    add_router_policy(group)
    group.add_argument(
        "--prefill-fallback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let decode workers compute prompts if no prefill worker is available (default); otherwise such requests "
        "wait, then get 503",
    )
    group.add_argument(
        "--session-ttl",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="seconds that an idle session is kept, as the workers' flag of this name (default: 600)",
    )


def _add_cells(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cells",
        nargs="+",
        default=[],
        metavar="NAME=URL",
        help="other cells: the --cluster of their workers, and their Redis. They get requests that this gateway's own "
        "cell (--cluster, --redis-url) cannot take: while it is full, has no workers or no Redis (docs/cells.md) "
        "(default: none)",
    )
    group.add_argument(
        "--cell-password-files",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="files with the passwords of the Redis of --cells; one that is missing keeps its cell away until it is "
        "there (default: none)",
    )


def _add_queue_and_stop(group: argparse._ArgumentGroup) -> None:
    add_queue(group)
    group.add_argument(
        "--from-zero-timeout",
        type=positive_float,
        metavar="S",
        help="for fleets that scale to zero: be ready without workers, and let up to --max-waiting-requests new "
        "choices wait S seconds for the first worker (default: not ready, and 9 s)",
    )
    group.add_argument(
        "--worker-start-wait",
        type=positive_float,
        default=120.0,
        metavar="S",
        help="maximum wait of a new choice for workers that start, in seconds, while none of a role is available; the "
        "starts of one worker count for as long in total (default: 120)",
    )
    group.add_argument(
        "--replaced-workers",
        action="store_true",
        help="something replaces lost workers, as Kubernetes does: for --worker-start-wait seconds after the last one "
        "of a role was lost, new choices wait for the next one although none reports its start",
    )
    group.add_argument(
        "--drain-notice",
        type=non_negative_float,
        default=1.0,
        metavar="S",
        help="seconds that /ready is false after SIGTERM before the port closes (default: 1)",
    )
    group.add_argument(
        "--drain-timeout",
        type=positive_float,
        default=GATEWAY_DRAIN_S,
        metavar="S",
        help="seconds that running requests then have to finish; keep a pod's grace period above the sum of both "
        "(default: 120)",
    )


def process_count(text: str) -> int:
    """Raises `ArgumentTypeError`."""
    from tandem_engine.base.cgroups import usable_cpus
    from tandem_services.gateway.process_place import MAX_PROCESSES

    if text == "auto":
        return min(MAX_PROCESSES, usable_cpus())
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"must be auto or a number from 1 to {MAX_PROCESSES}, got {text!r}")
    return int(text)


def _check_processes(args: argparse.Namespace) -> None:
    if args.processes > 1 and args.admin_port is None:
        raise ConfigError(
            f"--processes {args.processes}: add --admin-port PORT, where all processes have their metrics"
        )


def check(args: argparse.Namespace) -> None:
    """Refuse what the gateway would not start with. Raises `ConfigError`."""
    _check_processes(args)
    models_of(args)
    tracing_of(args)


def check_flags(args: argparse.Namespace) -> None:
    """The same without a look at any file. Raises `ConfigError`."""
    _check_processes(args)
    _model_config(argparse.Namespace(**{**vars(args), "redis_password_file": None}), _folder(args, _unchecked))
    tracing_of(args)


def run(args: argparse.Namespace) -> int:
    from tandem_engine.base.logs import LogFormat

    with lasting():
        from tandem_services.gateway.config import GatewayConfig, ModelsSource
        from tandem_services.gateway.process_place import read_place
        from tandem_services.gateway.processes.supervisor import supervise
        from tandem_services.gateway.serve import front_server, serve

    keep_files_private()
    allow_many_descriptors()
    require_threads(THREADS)
    models = models_of(args)
    fleet_model = next((model for model in models if model.path is None), None)
    config = GatewayConfig(
        models=() if fleet_model is not None else models,
        fleet_model=fleet_model,
        models_file=None if args.models is None else ModelsSource(args.models, model_flags(args)),
        independent_models=args.independent_models,
        host=args.host,
        port=args.port,
        allowed_hosts=tuple(args.allowed_hosts),
        strict_fields=args.strict_fields,
        bodies_bytes=args.max_body_memory << 20,
        bodies_bytes_per_client=args.max_body_memory_per_client << 20,
        drain_notice_s=args.drain_notice,
        drain_timeout_s=args.drain_timeout,
        api_keys=args.api_keys,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        tracing=tracing_of(args),
        console=args.console,
        log_format=LogFormat(args.log_format),
        log_level=read_settings().log_level,
        place=None if args.process_place is None else read_place(args.process_place),
    )
    if args.processes == 1 or config.place is not None:
        return serve(config)
    # The same command line with a place: each process reads flags, files and variables itself.
    command = [sys.executable, "-m", "tandem_services.cli.main", *sys.argv[1:]]
    return supervise(config, args.processes, command, partial(front_server, config))


def from_zero(timeout_s: float | None) -> dict[str, Any]:
    """Fields of `ModelConfig`."""
    return {} if timeout_s is None else {"from_zero": True, "queue_s": timeout_s}


def models_of(args: argparse.Namespace) -> "tuple[ModelConfig, ...]":
    """Those of the file, or the one that the flags say; none where each is opened later. Raises `ConfigError`."""
    from tandem_services.gateway.models.file import check_models, read_models

    if args.models is not None and (args.cells or args.cell_password_files):
        raise ConfigError("--cells are of one model: leave out --models, or start a gateway for each model")
    if args.models is not None and (args.model is not None or args.served_model_name is not None):
        raise ConfigError("--models names all models: leave out --model and --served-model-name")
    if args.independent_models:
        if args.models is None:
            raise ConfigError("--independent-models is about entries of a file: add --models FILE")
        return ()
    flags = model_flags(args)
    if args.models is not None:
        return read_models(args.models, flags)
    check_models([flags], "--served-model-name")
    return (flags,)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def model_flags(args: argparse.Namespace) -> "ModelConfig":
    """The one model that the flags say or, with a file, what its entries leave out. Raises `ConfigError`."""
    folder = Path() if args.models is not None else _folder(args, model_folder)
    return _model_config(args, folder)


def _folder(args: argparse.Namespace, located: Callable[[str | None], Path]) -> Path | None:
    """None: the workers send the tokenizer. Raises `ConfigError`."""
    if args.model != FLEET_MODEL:
        return located(args.model)
    if not args.served_model_name:
        raise ConfigError(f"--model {FLEET_MODEL}: add --served-model-name NAME, that of the workers")
    return None


def _unchecked(model: str | None) -> Path:
    return Path(model or "model")


def _model_config(args: argparse.Namespace, folder: Path | None) -> "ModelConfig":
    from tandem_services.common.redis_client import RedisAddress
    from tandem_services.gateway.config import ModelConfig
    from tandem_services.router.cells.places import read_places
    from tandem_services.router.policies import PolicyNames

    return ModelConfig(
        path=folder,
        names=served_names(args, folder or Path(FLEET_MODEL)),
        root=args.model_root,
        redis=RedisAddress(url=args.redis_url, password_file=args.redis_password_file),
        cluster=args.cluster,
        cells=read_places(args.cells, args.cell_password_files, own=args.cluster),
        curve_keys=args.curve_keys,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        local_prefill_tokens=args.local_prefill_tokens,
        policies=PolicyNames.parse(args.router_policy),
        exploration=args.router_exploration,
        objectives=Objectives(ttft_s=_seconds(args.slo_ttft_ms), itl_s=_seconds(args.slo_itl_ms)),
        slo_admission=SloMode(args.slo_admission),
        slo_percentile=args.slo_percentile,
        explain_candidates=args.explain_candidates,
        parse_special_tokens=args.parse_special_tokens,
        session_ttl_s=args.session_ttl,
        max_waiting=args.max_waiting_requests,
        room_s=args.queue_timeout,
        start_wait_s=args.worker_start_wait,
        replaced_workers=args.replaced_workers,
        **from_zero(args.from_zero_timeout),
        prefill_fallback=args.prefill_fallback,
    )
