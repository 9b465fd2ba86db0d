"""The models file: the model services of a gateway (docs/multi-model.md). JSON, or TOML if the file is named so.

    {"models": [{"model": "/models/llama", "served_model_name": ["llama", "gpt-4o-mini"], "cluster": "llama"}, …]}

An entry uses the names of the gateway's flags; fields that it omits have the values of the command line. Paths are
relative to the file.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_services.common.file_watcher import Follower, Signature, signature_of
from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.redis_client import RedisAddress
from tandem_services.common.settings import FLEET_MODEL
from tandem_services.gateway.config import ModelConfig, ModelsSource
from tandem_services.gateway.models.catalog import FAULTS, LiveModels
from tandem_services.gateway.objectives import Milliseconds, Objectives, SloMode
from tandem_services.gateway.output.reasoning import REASONING_PARSERS
from tandem_services.gateway.output.tool_parsers.registry import TOOL_CALL_PARSERS
from tandem_services.router.keys import Keys
from tandem_services.router.policies import PolicyNames

MAX_FILE_BYTES = 1 << 20

MAX_MODELS = 64
"""Each has its own connections to Redis, queue and tokenizer."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model service; each field as the flag of its name."""

    model: Text
    """Checkpoint folder, or "fleet": the workers send the tokenizer."""
    served_model_name: Name | Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=32)] | None = None
    """The model's own name, followed by its aliases."""
    cluster: Text | None = None
    redis_url: Text | None = None
    redis_password_file: Text | None = None
    curve_keys: Text | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    router_policy: str | None = None
    router_exploration: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    local_prefill_tokens: Count | None = None
    session_ttl: Seconds | None = None
    from_zero_timeout: Seconds | None = None
    worker_start_wait: Seconds | None = None
    max_waiting_requests: Count | None = None
    queue_timeout: Seconds | None = None
    prefill_fallback: bool | None = None
    parse_special_tokens: bool | None = None
    slo_ttft_ms: Milliseconds | None = None
    slo_itl_ms: Milliseconds | None = None
    slo_percentile: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    slo_admission: SloMode | None = None


class ModelsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    models: Annotated[tuple[ModelEntry, ...], msgspec.Meta(max_length=MAX_MODELS)]


def read_models(path: Path, defaults: ModelConfig) -> tuple[ModelConfig, ...]:
    """All model services of a file. `defaults` has values of omitted fields; its path and names are not used.

    Raises `ConfigError` naming the file, the entry and the fault.
    """
    entries = _parse(path)
    if not entries:
        raise ConfigError(f"{path}: models is empty; add one, or start with --independent-models")
    models = tuple(_config(entry, defaults, path, f"models[{n}]") for n, entry in enumerate(entries))
    for number, model in enumerate(models):
        if model.path is None:
            raise ConfigError(f"{path}: models[{number}].model: {FLEET_MODEL!r} requires --independent-models")
    check_models(models, str(path))
    return models


def read_each_model(path: Path, defaults: ModelConfig) -> tuple[tuple[ModelConfig, ...], dict[str, str]]:
    """As `read_models`, but an entry with a fault is left out, and there may be none: the faults, by name.

    Raises `ConfigError` for a file that cannot be read, and for a name or a fleet that is given twice.
    """
    models, faults = [], {}
    for number, entry in enumerate(_parse(path)):
        try:
            models.append(_config(entry, defaults, path, f"models[{number}]"))
        except ConfigError as error:
            faults[_names(entry, Path(entry.model), "")[0]] = str(error)
    check_models(models, str(path))
    return tuple(models), faults


def check_models(models: Sequence[ModelConfig], where: str) -> None:
    """Raises `ConfigError` unless each name means one model, and each fleet belongs to one."""
    names: set[str] = set()
    fleets: dict[tuple[str, str], str] = {}
    for model in models:
        Keys(model.cluster)
        for name in model.names:
            if not name:
                raise ConfigError(f"{where}: a name must not be empty")
            if name in names:
                raise ConfigError(f"{where}: the name {quoted(name)} is given twice")
            names.add(name)
        fleet = (model.redis.url, model.cluster)
        if fleet in fleets:
            raise ConfigError(
                f"{where}: {quoted(model.name)} and {quoted(fleets[fleet])} have the same cluster "
                f"{quoted(model.cluster)}: give each its own, as their workers have"
            )
        fleets[fleet] = model.name


def _parse(path: Path) -> tuple[ModelEntry, ...]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--models: cannot read {path} ({error.strerror})") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(content, type=ModelsFile).models
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {quoted(str(error))}") from error
    except (msgspec.DecodeError, ValueError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"{path}: not valid {kind}: {quoted(str(error))}") from error


def _config(entry: ModelEntry, defaults: ModelConfig, file: Path, where: str) -> ModelConfig:
    def located(text: str) -> Path:
        return Path(os.path.normpath(file.parent / Path(text).expanduser()))

    folder = None if entry.model == FLEET_MODEL else located(entry.model)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{file}: {where}.model: {folder} is no folder")
    _check_one_of(entry.tool_call_parser, TOOL_CALL_PARSERS, f"{file}: {where}.tool_call_parser")
    _check_one_of(entry.reasoning_parser, REASONING_PARSERS, f"{file}: {where}.reasoning_parser")
    given: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
        "cluster": (entry.cluster, str),
        "curve_keys": (entry.curve_keys, located),
        "tool_call_parser": (entry.tool_call_parser, str),
        "reasoning_parser": (entry.reasoning_parser, str),
        "policies": (entry.router_policy, PolicyNames.parse),
        "exploration": (entry.router_exploration, float),
        "local_prefill_tokens": (entry.local_prefill_tokens, int),
        "session_ttl_s": (entry.session_ttl, float),
        "from_zero": (entry.from_zero_timeout, bool),
        "queue_s": (entry.from_zero_timeout, float),
        "start_wait_s": (entry.worker_start_wait, float),
        "max_waiting": (entry.max_waiting_requests, int),
        "room_s": (entry.queue_timeout, float),
        "prefill_fallback": (entry.prefill_fallback, bool),
        "parse_special_tokens": (entry.parse_special_tokens, bool),
        "slo_percentile": (entry.slo_percentile, float),
        "slo_admission": (entry.slo_admission, SloMode),
    }
    fields = {name: read(value) for name, (value, read) in given.items() if value is not None}
    return replace(
        defaults,
        path=folder,
        names=_names(entry, folder, f"{file}: {where}"),
        redis=_redis(entry, defaults.redis, located),
        objectives=_objectives(entry, defaults.objectives),
        **fields,
    )


def _objectives(entry: ModelEntry, default: Objectives) -> Objectives:
    return Objectives(
        ttft_s=default.ttft_s if entry.slo_ttft_ms is None else entry.slo_ttft_ms / 1000,
        itl_s=default.itl_s if entry.slo_itl_ms is None else entry.slo_itl_ms / 1000,
    )


def _names(entry: ModelEntry, folder: Path | None, where: str) -> tuple[str, ...]:
    match entry.served_model_name:
        case None if folder is None:
            raise ConfigError(
                f"{where}.served_model_name is required with model {FLEET_MODEL!r}: it is that of the workers"
            )
        case None:
            assert folder is not None
            return (folder.name,)
        case str() as name:
            return (name,)
        case names:
            return names


def _redis(entry: ModelEntry, default: RedisAddress, located: Callable[[str], Path]) -> RedisAddress:
    """A separate Redis has a separate password."""
    secret = None if entry.redis_password_file is None else located(entry.redis_password_file)
    if entry.redis_url is not None:
        return RedisAddress(url=entry.redis_url, password_file=secret)
    return default if secret is None else replace(default, password_file=secret)


def _check_one_of(value: str | None, known: Sequence[str], where: str) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{where} must be one of {', '.join(known)}, got {quoted(value)}")


logger = logging.getLogger(__name__)
Models = tuple[ModelConfig, ...]


class ModelsFileMetrics:
    """What can be seen of the file from outside."""

    def __init__(self, families: MetricFamilies, *, served: int) -> None:
        self._served = families.gauge("tandem_gateway_models", "Model services that are served")
        self._stale = families.gauge(
            "tandem_gateway_models_file_stale", "1 while the models file is invalid and the previous models are served"
        )
        self._unserved = families.gauge(
            "tandem_gateway_models_unserved", "Entries of the models file that cannot be served as they are"
        )
        self._reloads = families.counter(
            "tandem_gateway_models_file_reloads", "Changes of the models file, by outcome", ["outcome"]
        )
        self._served.set(served)

    def loaded(self, served: int) -> None:
        self._served.set(served)
        self._stale.set(0)
        self._reloads.series("loaded").inc()

    def refused(self) -> None:
        self._stale.set(1)
        self._reloads.series("refused").inc()

    def mended(self) -> None:
        self._stale.set(0)

    def unserved(self, entries: int) -> None:
        self._unserved.set(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsWatch:
    """Makes `live` match the file of `source`."""

    source: ModelsSource
    live: LiveModels[Any]
    metrics: ModelsFileMetrics

    def follower(self, served: Models) -> Follower[Models]:
        """`served`: content of the file at start."""
        return Follower(
            value=served,
            signature=self._signature,
            read=lambda: read_models(self.source.path, self.source.defaults),
            take=self._take,
            refused=self._refused,
            mended=self.metrics.mended,
            faults=FAULTS,
        )

    async def run(self, served: Models) -> None:
        """Follow changes until canceled."""
        await self.follower(served).run(logger, what="models")

    def _signature(self) -> Signature:
        try:
            return signature_of([self.source.path])
        except OSError:
            return ()

    async def _take(self, models: Models) -> None:
        await self.live.change(models)
        self.metrics.loaded(len(models))

    def _refused(self, failure: str) -> None:
        self.metrics.refused()
        logger.error("changed models are invalid, keeping the previous ones: %s", quoted(failure))
