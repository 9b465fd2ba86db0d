"""Environment variables of the services. Only this module reads the environment, once at start.

A value is the default of its flag, if there is one: the flag wins. Secrets are best passed as files, which appear
neither in the environment nor on a command line [secrets-in-files].
"""

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.errors import ConfigError

PREFIX = "TANDEM_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

OPENAI_API_KEY = "OPENAI_API_KEY"
"""Where clients of OpenAI's API have their key."""

FLEET_MODEL = "fleet"
"""--model of a gateway whose workers send the tokenizer, and `model` in a models file."""

SWITCH_WORDS = {"1": True, "true": True, "0": False, "false": False}
"""Values of a variable that is on or off."""

LOG_LEVELS = ("debug", "info", "warning", "error")

KNOWN = {
    "TANDEM_REDIS_URL": "address of Redis: redis://, redis+cluster://, redis+sentinel://, unix://; rediss for TLS",
    "TANDEM_REDIS_PASSWORD_FILE": "file with the Redis password",
    "TANDEM_CLUSTER": "name of the deployment within Redis",
    "TANDEM_CURVE_KEYS": "file with the key pair of worker and gateway sockets",
    "TANDEM_WORKER_ID": "stable name of this worker; the pod name",
    "TANDEM_HOST": "address that other pods reach this process at; the pod IP",
    "TANDEM_API_KEY": "key that `tandem chat` and `tandem bench serve` send; without it OPENAI_API_KEY",
    "TANDEM_HEALTH_HOST": "address of a worker's port for probes and Prometheus; :: in a pod",
    "TANDEM_PEER_GROUP": "group of workers that this one exchanges KV with; the revision",
    "TANDEM_STANDBY": "1: a worker takes only requests that name it until it is offered",
    "TANDEM_LOG_LEVEL": "debug, info, warning or error",
    "TANDEM_CONFIG": "file of settings, as --config",
    "TANDEM_CACHE_DIR": "folder for compiled CPU kernels; $XDG_CACHE_HOME/tandem without it",
    "TANDEM_KERNELS_PATH": "more folders with compiled CPU kernels, separated by colons; they are read alone",
    "TANDEM_KERNEL_TARGET": "kind of CPU that kernels are compiled for, such as x86-64-v3, or native",
    "TANDEM_TORCH": "read by set-up: cpu or cuda build of torch",
    "TANDEM_VENV": "read by set-up: folder of the virtual environment",
    "TANDEM_KUBE_HOME": "read by tests: where Kubernetes is built and kept",
    "TANDEM_PEERS_HOME": "read by benchmarks: where other engines, models and their logs are kept",
    "TANDEM_KUBE_REQUIRED": "read by tests: without Kubernetes they fail instead of being skipped",
    "TANDEM_HELM_HOME": "read by tests: where the Helm library is kept",
    "TANDEM_HELM_PYTHON": "read by set-up of Helm: a Python of 3.12 or later",
    "TANDEM_REGISTRY": "read by the image build: where images will be pushed",
    "TANDEM_VERSION": "read by the image build: tag of the images",
    "TANDEM_CONTAINER_TOOL": "read by the image build: docker, podman or buildah",
    "TANDEM_BUILD_ARGS": "read by the image build: more arguments for that tool",
    "TANDEM_PIP_CONF": "read by the image build: pip's settings inside of it",
}
"""Every variable that means something to Tandem beyond the flags' own, with what it means."""

_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Kubernetes adds such variables for every Service of the namespace, ours (`tandem-…`) included."""

_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
"""`TANDEM_PORT` of a Service named tandem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The environment of a service process. None: not set."""

    state_home: Path | None = None
    """For what programs keep of their runs (XDG_STATE_HOME); None: the user has no home folder."""
    notify_socket: str | None = None
    """Where a service manager such as systemd listens (NOTIFY_SOCKET); None: none started this process."""
    redis_url: str | None = None
    redis_password_file: Path | None = None
    cluster: str = "default"
    curve_keys: Path | None = None
    worker_id: str | None = None
    host: str | None = None
    api_key: str | None = field(default=None, repr=False)
    cuda_visible_devices: str | None = None
    """As CUDA reads it; "" hides every GPU."""
    health_host: str | None = None
    peer_group: str = ""
    standby: bool = False
    log_level: int = logging.INFO
    otlp_traces_endpoint: str | None = None
    """Where spans go, by the standard's variables; None: nowhere, or tracing is switched off by one of them."""
    otlp_protocol: str = "http/protobuf"
    otel_switched_off: bool = False
    """OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER says so; it wins over flags."""
    otel_max_waiting_spans: int = 2048
    """Spans that may wait to be sent."""
    warnings: tuple[str, ...] = ()
    """One sentence per TANDEM_ variable that means nothing, for the log."""


def read_settings(environ: Mapping[str, str] | None = None, *, of_flags: frozenset[str] = frozenset()) -> Settings:
    """Settings of this process, or of the given variables. An empty value is the same as none.

    `of_flags`: variables that set flags, so that there is no warning about them.

    Raises `ConfigError` for a log level or a switch that is none.
    """
    variables = os.environ if environ is None else environ
    values = {name: value for name, value in variables.items() if name.startswith(PREFIX) and value}
    return Settings(
        state_home=_state_home(variables.get("XDG_STATE_HOME", "")),
        notify_socket=variables.get("NOTIFY_SOCKET") or None,
        redis_url=values.get("TANDEM_REDIS_URL"),
        redis_password_file=_path(values, "TANDEM_REDIS_PASSWORD_FILE"),
        cluster=values.get("TANDEM_CLUSTER", "default"),
        curve_keys=_path(values, "TANDEM_CURVE_KEYS"),
        worker_id=values.get("TANDEM_WORKER_ID"),
        host=values.get("TANDEM_HOST"),
        cuda_visible_devices=variables.get("CUDA_VISIBLE_DEVICES"),
        api_key=values.get("TANDEM_API_KEY") or variables.get(OPENAI_API_KEY) or None,
        health_host=values.get("TANDEM_HEALTH_HOST"),
        peer_group=values.get("TANDEM_PEER_GROUP", ""),
        standby=_switch(values, "TANDEM_STANDBY"),
        log_level=_log_level(values.get("TANDEM_LOG_LEVEL", "info")),
        otlp_traces_endpoint=_otlp_endpoint(variables),
        otlp_protocol=_first(variables, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf",
        otel_switched_off=_otel_switched_off(variables),
        otel_max_waiting_spans=_positive(variables, "OTEL_BSP_MAX_QUEUE_SIZE", default=2048),
        warnings=tuple(
            _unknown(name, of_flags) for name in sorted(values) if name not in of_flags and not _is_known(name)
        ),
    )


def flag_variables() -> dict[str, str]:
    """Variables of this process that may set flags: those with a value that are no link to a Service of Kubernetes."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and value and not (_is_service_link(name) and _LINK_VALUE.match(value))
    }


def forget_variables(names: Iterable[str]) -> None:
    """Remove variables of flags from the environment of this process: its children get flags and do not read them.

    Those of `KNOWN` stay: they are the same for all processes of a deployment.
    """
    for name in names:
        if name not in KNOWN or name == CONFIG_VARIABLE:
            os.environ.pop(name, None)


def all_variables() -> Mapping[str, str]:
    """The environment as it is, secrets included: for `tandem doctor`, which shows some names and fewer values."""
    return dict(os.environ)


def _state_home(given: str) -> Path | None:
    """As the XDG base directory specification has it: a relative path is ignored."""
    folder = Path(given if Path(given).is_absolute() else os.path.expanduser("~/.local/state"))  # noqa: PTH111  raises nothing without a home
    return folder if folder.is_absolute() else None


def _otlp_endpoint(variables: Mapping[str, str]) -> str | None:
    """The signal's own variable is taken as it is, the general one names the collector (OTLP's specification)."""
    own, general = _first(variables, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), variables.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if own is not None or not general:
        return own
    return f"{general.rstrip('/')}/v1/traces"


def _otel_switched_off(variables: Mapping[str, str]) -> bool:
    disabled = variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporters = variables.get("OTEL_TRACES_EXPORTER") or "otlp"
    return disabled or "otlp" not in [name.strip() for name in exporters.split(",")]


def _first(variables: Mapping[str, str], *names: str) -> str | None:
    """Of those that are set and not empty."""
    return next((value for name in names if (value := variables.get(name))), None)


def _positive(variables: Mapping[str, str], name: str, *, default: int) -> int:
    text = variables.get(name)
    if not text:
        return default
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {text[:50]!r}")
    return int(text)


def _is_known(name: str) -> bool:
    return name in KNOWN or _is_service_link(name)


def _is_service_link(name: str) -> bool:
    return any(match.end() == len(name) for match in _SERVICE_LINK.finditer(name))


def _path(values: Mapping[str, str], name: str) -> Path | None:
    return Path(values[name]) if name in values else None


def _switch(values: Mapping[str, str], name: str) -> bool:
    text = values.get(name, "0")
    if text not in SWITCH_WORDS:
        raise ConfigError(f"{name} must be true or false, got {text[:50]!r}")
    return SWITCH_WORDS[text]


def _log_level(name: str) -> int:
    if name.lower() not in LOG_LEVELS:
        raise ConfigError(f"TANDEM_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, got {name[:200]!r}")
    return logging.getLevelNamesMapping()[name.upper()]


def _unknown(name: str, of_flags: frozenset[str]) -> str:
    # Without the prefix, which would make everything look alike.
    bare = {known.removeprefix(PREFIX): known for known in (*KNOWN, *sorted(of_flags))}
    nearest = difflib.get_close_matches(name.removeprefix(PREFIX), bare, n=1)
    advice = f"did you mean {bare[nearest[0]]}?" if nearest else f"known are {', '.join(KNOWN)}"
    return f"environment variable {name} means nothing to Tandem; {advice}"
