"""Flags that several commands share, each defined once. The environment provides defaults; flags win.

The API key of a command comes from the environment or from a flag. `ps` shows command lines to every user, so a key
from a flag is overwritten in the process's title as soon as it is read (`hide_argument`). It was visible until then,
and the history of a shell may keep it: the two environment variables are safer.
"""

import argparse
import ctypes
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.errors import ConfigError
from tandem_engine.config import AdapterConfig
from tandem_engine.config.flags import count, host_address, non_negative_int, positive_mib
from tandem_services.cli.logs.pump import LogTo
from tandem_services.common.settings import FLEET_MODEL, read_settings
from tandem_services.gateway.objectives import MAX_MS
from tandem_services.gateway.output.reasoning import REASONING_PARSERS
from tandem_services.gateway.output.tool_parsers.registry import TOOL_CALL_PARSERS

if TYPE_CHECKING:
    from tandem_services.common.tracing import TracingConfig


GATEWAY_DRAIN_S, WORKER_DRAIN_S = 120.0, 25.0
"""Seconds that running requests have after SIGTERM, by default."""


def port_number(text: str) -> int:
    """0 to 65535."""
    port = non_negative_int(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"must be between 0 and 65535, got {text}")
    return port


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def non_negative_float(text: str) -> float:
    """A finite number of at least 0."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def milliseconds(text: str) -> float:
    """Above 0, and at most a day."""
    value = positive_float(text)
    if value > MAX_MS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_MS:.0f}, got {text}")
    return value


def percentile(text: str) -> float:
    """Between 0 and 1, and neither."""
    value = _finite(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return value


def fraction(text: str) -> float:
    """0 to 1."""
    value = _finite(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def add_model(parser: argparse._ActionsContainer) -> None:
    """--model and the names it is served under."""
    parser.add_argument("--model", metavar="PATH", help="checkpoint directory (default: the bundled model)")
    add_served_names(parser)


def add_gateway_model(parser: argparse._ActionsContainer) -> None:
    """The same of a gateway, whose workers may send what it needs."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help=f"checkpoint directory, of which the weights are not read, or {FLEET_MODEL!r}: the workers send the "
        "tokenizer (default: the bundled model)",
    )
    add_served_names(parser)


def add_served_names(parser: argparse._ActionsContainer) -> None:
    """The names that a model is served under."""
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="name that clients use (default: the directory's, or org/name of a hub); further names are "
        "aliases, which only gateways need",
    )


def served_names(args: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """The model's own name, and its aliases."""
    return tuple(args.served_model_name or (folder.name,))


def require_adapters(adapters: AdapterConfig, names: Sequence[str]) -> None:
    """Raise `ConfigError` for an adapter without a folder, and for one that has one of the model's `names`: the model
    would get its requests."""
    for source in adapters.sources:
        if source.name in names:
            raise ConfigError(f"--lora-modules: {source.name!r} is a name of the model: give the adapter another name")
        folder = adapters.located(source.path)
        try:
            exists = folder.is_dir()
        except OSError as error:
            raise ConfigError(f"--lora-modules: {source.name}: {folder} cannot be read: {error.strerror}") from error
        if not exists:
            raise ConfigError(f"--lora-modules: {source.name}: {folder} is no folder")


def add_output_parsers(parser: argparse._ActionsContainer) -> None:
    """How the gateway reads what a model writes."""
    parser.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default="auto",
        help="format of the model's tool calls; auto: by its chat template (default: auto)",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="format of the model's reasoning; auto: by its chat template (default: auto)",
    )


def add_listen_host(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--host",
        type=host_address,
        default=LOOPBACK,
        help="address to listen on; 0.0.0.0 for all of IPv4, :: for all of IPv6 and IPv4 (default: %(default)s)",
    )


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """What the processes of one deployment must agree on."""
    group = parser.add_argument_group("deployment")
    add_redis(group, required=True)
    add_cluster(group)
    add_curve_keys(group, "without it only loopback is served")


def add_curve_keys(parser: argparse._ActionsContainer, without: str) -> None:
    """`without`: what is so where there is none."""
    parser.add_argument(
        "--curve-keys",
        type=Path,
        default=read_settings().curve_keys,
        metavar="FILE",
        help=f"key file of the deployment; {without} (TANDEM_CURVE_KEYS)",
    )


def add_log_format(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--log-format",
        choices=("plain", "json"),
        default="plain",
        help="format of log lines, json for machines (default: plain)",
    )


def add_logs(parser: argparse._ActionsContainer) -> None:
    """Of a command that starts others."""
    add_log_format(parser)
    parser.add_argument(
        "--log-to",
        choices=[to.value for to in LogTo],
        default=LogTo.FILES.value,
        help="where the lines of all processes go: files in the run directory, standard output with the name of the "
        "process, or both (default: files)",
    )


def add_redis(parser: argparse._ActionsContainer, *, required: bool) -> None:
    """Where Redis is. Other users of the machine can read a command line, so passwords have other ways in."""
    settings = read_settings()
    parser.add_argument(
        "--redis-url",
        required=required and settings.redis_url is None,
        default=settings.redis_url,
        metavar="URL",
        help="redis://[user@]host:port/db, redis+cluster://host:port,…, redis+sentinel://host:port,…/service or "
        "unix://; rediss for TLS (TANDEM_REDIS_URL)" + ("" if required else "; default: start a private Redis"),
    )
    parser.add_argument(
        "--redis-password-file",
        type=Path,
        default=settings.redis_password_file,
        metavar="FILE",
        help="file with the Redis password, which a command line would show to other users of the machine "
        "(TANDEM_REDIS_PASSWORD_FILE)",
    )


def add_cluster(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cluster",
        default=read_settings().cluster,
        metavar="NAME",
        help="name that separates deployments in one Redis (TANDEM_CLUSTER; default: default)",
    )


def add_local_prefill(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--local-prefill-tokens",
        type=count,
        default=2048,
        metavar="N",
        help="maximum number of prompt tokens for a decode worker to compute itself, if that is predicted to be "
        "faster than a prefill worker and a transfer; 0: only if no prefill worker is available (default: 2048)",
    )


def add_queue(parser: argparse._ActionsContainer) -> None:
    """Bounds of a gateway's queue."""
    parser.add_argument(
        "--max-waiting-requests",
        type=count,
        default=1024,
        metavar="N",
        help="maximum number of new choices that wait for a worker with capacity; more are rejected with 429 or 503 "
        "(default: 1024)",
    )
    parser.add_argument(
        "--queue-timeout",
        type=positive_float,
        default=60.0,
        metavar="S",
        help="maximum wait of a new choice for capacity, in seconds; then it is rejected with 503. While no "
        "worker is available 9 s, and longer while one starts (default: 60)",
    )


def add_body_memory(parser: argparse._ActionsContainer) -> None:
    """Bounds of a gateway's `BodyBudget`."""
    parser.add_argument(
        "--max-body-memory",
        type=positive_mib,
        default=256,
        metavar="MIB",
        help="memory for request bodies in flight of all clients, in MiB; more are rejected with 429 (default: 256)",
    )
    parser.add_argument(
        "--max-body-memory-per-client",
        type=positive_mib,
        default=64,
        metavar="MIB",
        help="the same per client, in MiB. A client is a tenant with --api-keys, else an address; raise the limit if "
        "all clients use one proxy (default: 64)",
    )


def body_memory_argv(args: argparse.Namespace) -> list[str]:
    """Of `add_body_memory`."""
    words = ["--max-body-memory", str(args.max_body_memory)]
    return [*words, "--max-body-memory-per-client", str(args.max_body_memory_per_client)]


def add_special_tokens(parser: argparse._ActionsContainer) -> None:
    """What text prompts may hold. Gateways and routers of one deployment agree on it: equal ids have equal prefixes."""
    parser.add_argument(
        "--parse-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="special tokens in text prompts become control tokens, as in vLLM (default); with "
        "--no-parse-special-tokens they are plain text, and a request or a key cannot change it. Messages of chats "
        "never become control tokens",
    )


def add_router_policy(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--router-policy",
        type=_router_policy,
        default="locality",
        metavar="POLICY",
        help="policy that selects workers: locality (cached prefixes and load in predicted seconds), round_robin, "
        "least_loaded, power_of_two or session (by the request's session_id, prompt_cache_key or user); one for all, "
        "or prefill=POLICY,decode=POLICY (default: locality)",
    )
    parser.add_argument(
        "--router-exploration",
        type=fraction,
        nargs="?",
        const=0.01,
        default=0.0,
        metavar="SHARE",
        help="share of requests that are sent to random workers, so that the measured rates of workers that are "
        "never the cheapest stay current (default: 0; 0.01 without SHARE)",
    )


def add_tracing(parser: argparse._ActionsContainer) -> None:
    """Flags of OpenTelemetry; see `tracing_of`."""
    parser.add_argument(
        "--otlp-traces-endpoint",
        default=read_settings().otlp_traces_endpoint,
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, by OTLP over HTTP, e.g. "
        "http://collector:4318 (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; default: no traces)",
    )
    parser.add_argument(
        "--otlp-traces-sample-ratio",
        type=fraction,
        metavar="F",
        help="share of the traces that start here, 0 to 1; traces started by a client keep the client's sampling "
        "decision (OTEL_TRACES_SAMPLER; default: all)",
    )


def tracing_of(args: argparse.Namespace) -> "TracingConfig | None":
    """None when there is no tracing. Raises `ConfigError` for an endpoint or a protocol that cannot work."""
    from tandem_services.common.tracing import TracingConfig

    settings = read_settings()
    if args.otlp_traces_endpoint is None or settings.otel_switched_off:
        return None
    return TracingConfig(
        endpoint=args.otlp_traces_endpoint,
        protocol=settings.otlp_protocol,
        sample_ratio=args.otlp_traces_sample_ratio,
        max_waiting_spans=settings.otel_max_waiting_spans,
    )


def tracing_argv(args: argparse.Namespace) -> list[str]:
    """The same flags for a child process."""
    argv = []
    if args.otlp_traces_endpoint is not None:
        argv += ["--otlp-traces-endpoint", args.otlp_traces_endpoint]
    if args.otlp_traces_sample_ratio is not None:
        argv += ["--otlp-traces-sample-ratio", str(args.otlp_traces_sample_ratio)]
    return argv


def add_api_keys(parser: argparse._ActionsContainer) -> None:
    """Flags for the authentication of a gateway's users."""
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="PATH",
        help="key file, or directory of a mounted Secret, with the tenants' keys and limits (docs/limits.md); changes "
        "are applied while it runs (default: no key required)",
    )


def add_allowed_hosts(parser: argparse._ActionsContainer, *, what: str) -> None:
    """Against DNS rebinding: `common.allowed_hosts`."""
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"names in the Host header that {what}, such as llm.example.com or *.example.com; * for any. Addresses, "
        "localhost, this machine's names, names without a dot and those of Kubernetes Services need no entry",
    )


def add_console(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--console",
        action=argparse.BooleanOptionalAction,
        help="serve the console page at /console, on the port of /metrics (docs/console.md; default: if --admin-port, "
        "--api-keys or a loopback address protects it)",
    )


def _router_policy(text: str) -> str:
    """`text` as it is. Raises `ConfigError` here, so that `tandem up` starts nothing with a policy that is none."""
    from tandem_services.router.policies import PolicyNames

    PolicyNames.parse(text)
    return text


_KEY = re.compile(r"[\x21-\x7e]{1,512}")

_ARG_START, _ARG_END = 45, 46
"""Of the fields of /proc/PID/stat after the name: 48 and 49 of proc(5)."""


def add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="sent as a bearer token (default: TANDEM_API_KEY, then OPENAI_API_KEY, which no list of processes shows)",
    )


def key_headers(args: argparse.Namespace) -> dict[str, str]:
    """What requests carry; nothing without a key. Raises `ConfigError` for one that cannot be sent, not showing it."""
    if args.api_key is not None:
        hide_argument(args.api_key)
    key = args.api_key or read_settings().api_key
    if key is None:
        return {}
    if _KEY.fullmatch(key) is None:
        raise ConfigError("--api-key, TANDEM_API_KEY or OPENAI_API_KEY: a key has 1 to 512 visible ASCII characters")
    return {"Authorization": f"Bearer {key}"}


def hide_argument(secret: str) -> None:
    """Overwrite `secret` on the command line of this process, where Linux shows it to others. Elsewhere do nothing."""
    if not sys.platform.startswith("linux") or not secret:
        return
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    start, length = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    if start == 0 or length <= 0:
        return
    sought = secret.encode(sys.getfilesystemencoding(), "surrogateescape")
    shown = ctypes.string_at(start, length)
    at = shown.find(sought)
    while at >= 0:
        ctypes.memset(start + at, ord("*"), len(sought))
        at = shown.find(sought, at + len(sought))


NAME = "tandem-mini"


def bundled_model() -> Path:
    """Its folder, in an installed package or in a checkout. Raises `ConfigError` when neither has it."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "models" / NAME, package.parents[1] / "models" / NAME)
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        f"the bundled model is not installed here: name a checkpoint folder with --model (looked in {candidates})"
    )


def model_folder(path: str | None) -> Path:
    """The checkpoint that `--model` names, or the bundled one. Raises `ConfigError` when it is no checkpoint."""
    if path is None:
        return bundled_model()
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ConfigError(f"--model {path}: no such folder")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {path}: no config.json in it; name the folder of a Hugging Face checkpoint")
    return folder.resolve()
