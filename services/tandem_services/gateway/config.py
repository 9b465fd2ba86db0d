"""Configuration of a gateway and its model services: frozen, from flags. Durations are in seconds."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.addresses import LOOPBACK, is_loopback
from tandem_engine.base.logs import LogFormat
from tandem_services.common.redis_client import RedisAddress
from tandem_services.common.tracing import TracingConfig
from tandem_services.gateway.limits import BODIES_BYTES, BODIES_BYTES_PER_CLIENT
from tandem_services.gateway.objectives import NO_OBJECTIVES, Objectives, SloMode
from tandem_services.gateway.process_place import ProcessPlace
from tandem_services.router.cells.places import CellPlace
from tandem_services.router.policies import PolicyNames


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model service: a model, and the fleet that serves it."""

    path: Path | None
    """Folder with tokenizer.json; weights are not read. None: its workers send the tokenizer
    (`models.fleet_tokenizer`)."""
    names: tuple[str, ...]
    """Names clients use. The first is the model's own, which its workers have too; the others are aliases."""
    root: str = ""
    """What the model is, for clients: repository and commit. Empty: its name."""
    redis: RedisAddress = field(default_factory=lambda: RedisAddress(url="redis://127.0.0.1:6379/0"))
    cluster: str = "default"
    """Separates fleets in one Redis."""
    cells: tuple[CellPlace, ...] = ()
    """Other cells, which get requests that the fleet cannot take (`router.cells`)."""
    curve_keys: Path | None = None
    """Key file of the fleet, and of other cells; None only where every socket is on loopback."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    """Names in `TOOL_CALL_PARSERS` and `REASONING_PARSERS`."""
    parse_special_tokens: bool = True
    """Special tokens in text prompts become control tokens, unless a key or a request forbids it."""
    local_prefill_tokens: int = 2048
    """Most tokens that a decode worker may compute itself where that is predicted to be faster; 0 for none."""
    policies: PolicyNames = field(default_factory=PolicyNames)
    """How the router chooses, by role."""
    exploration: float = 0.0
    """Share of requests that go to workers at random."""
    objectives: Objectives = NO_OBJECTIVES
    """Of requests that name none."""
    slo_admission: SloMode = SloMode.OBSERVE
    """Which requests are rejected because their objectives are predicted to be missed."""
    slo_percentile: float = 0.95
    """Share of requests that a prediction with its margin is for."""
    explain_candidates: int = 100
    """Most decisions of a second that explain shows with what they were chosen from."""
    session_ttl_s: float = 600.0
    """An unused session is forgotten after this long; the workers' --session-ttl."""
    max_attempts: int = 3
    """Attempts in a row that bring one choice no further, on different workers where possible."""
    recovery_s: float = math.inf
    """A choice that lost its worker waits this long for another one when there is none; at most until its deadline."""
    queue_s: float = 9.0
    """A new choice waits this long for a worker when there is none, and none starts."""
    start_wait_s: float = 120.0
    """It waits this long, at most, for workers that start."""
    replaced_workers: bool = False
    """Something replaces lost workers: for `start_wait_s` from the loss of one, requests wait without its report."""
    from_zero: bool = False
    """The fleet may be scaled to zero: a gateway without any worker is ready all the same, and holds what comes."""
    room_s: float = 60.0
    """A new choice waits this long for room while there are workers."""
    worker_wait_s: float = 1.0
    """A worker has capacity for a prompt that waits at most this long for others."""
    max_waiting: int = 1024
    """Choices that may wait; others are refused at once."""
    prefill_fallback: bool = True
    """Without any prefill worker decode workers compute prompts."""
    silence_s: float = 10.0
    """A choice whose workers say nothing at all, one after the other, fails after this long."""

    @property
    def name(self) -> str:
        """The model's own."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class ModelsSource:
    """A models file, which is followed."""

    path: Path
    defaults: ModelConfig
    """What its entries leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Everything a gateway is built from."""

    models: tuple[ModelConfig, ...]
    """What it serves at its start; no two have a name or a fleet in common. Gateways share what tenants have used of
    their limits where the first one's fleet is."""
    models_file: ModelsSource | None = None
    """Where `models` come from; None: they never change."""
    independent_models: bool = False
    """Each entry of `models_file` is opened and closed by itself, and any may go. `models` is empty: they are opened
    later. Usage is shared where the defaults of the file say."""
    fleet_model: ModelConfig | None = None
    """The only model, if its workers send the tokenizer: it is opened once they have. `models` is empty then."""
    host: str = LOOPBACK
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    """Host names in addition to its own that requests may have; see `common.allowed_hosts`."""
    strict_fields: bool = False
    """Reject requests with unknown fields, as OpenAI does; otherwise they are ignored."""
    request_timeout_s: float = 600.0
    api_keys: Path | None = None
    """File or directory with the keys of all users of the gateway; None: authentication is disabled."""
    admin_host: str = LOOPBACK
    admin_port: int | None = None
    """Where administrators' routes are; None: /metrics is on the API's port, and there is no other."""
    console: bool | None = None
    """Serve the console where /metrics is; None: where something guards it, see `guarded`."""
    ping_interval_s: float = 1.0
    unanswered_pings: int = 3
    """A worker that owes this many answers is dead."""
    explain_records: int = 4096
    """Requests that can be explained."""
    bodies_bytes: int = BODIES_BYTES
    bodies_bytes_per_client: int = BODIES_BYTES_PER_CLIENT
    """Bytes of request bodies in flight, of all clients and of each."""
    tokenizer_threads: int = 2
    """For long texts; short ones have one of their own."""
    drain_notice_s: float = 1.0
    """On SIGTERM /ready is false for this long before the port closes."""
    drain_timeout_s: float = 120.0
    """After that, running requests have this long to finish."""
    keep_alive_s: int = 75
    place: ProcessPlace | None = None
    """Among the processes of this gateway; None: it is the only one."""
    tracing: TracingConfig | None = None
    """Where spans go; None: nowhere."""
    log_format: LogFormat = LogFormat.PLAIN
    log_level: int = logging.INFO

    @property
    def opens_later(self) -> bool:
        """Whether models are opened while the gateway serves, each by itself."""
        return self.independent_models or self.fleet_model is not None

    @property
    def home(self) -> ModelConfig | None:
        """Whose Redis, cluster and key belong to the gateway itself; None: those of the first of `models`."""
        if self.independent_models and self.models_file is not None:
            return self.models_file.defaults
        return self.fleet_model

    @property
    def guarded(self) -> bool:
        """Whether administrators' routes have a separate port, need a key, or are reachable from this machine alone."""
        return self.admin_port is not None or self.api_keys is not None or is_loopback(self.host)

    @property
    def serves_console(self) -> bool:
        return self.guarded if self.console is None else self.console
