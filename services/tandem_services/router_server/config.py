"""Configuration of a stand-alone router: frozen, from flags. Durations are seconds."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.addresses import LOOPBACK
from tandem_engine.base.logs import LogFormat
from tandem_services.common.redis_client import RedisAddress
from tandem_services.router.policies import PolicyNames


@dataclass(frozen=True, slots=True)
class TokenizedModel:
    """One --model."""

    names: tuple[str, ...]
    """What clients may call it; the first is its own, which its workers have too."""
    path: Path | None
    """Folder with tokenizer.json; None: its workers send it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterServerConfig:
    """Everything a stand-alone router is built from."""

    models: tuple[TokenizedModel, ...]
    """No two with a name in common. Token ids are routed for any model."""
    host: str = LOOPBACK
    allowed_hosts: tuple[str, ...] = ()
    """Additional host names that requests may be for; see `common.allowed_hosts`."""
    port: int = 8100
    grpc_port: int = 9002
    gateways: tuple[str, ...] = ()
    """HOST:PORT of the gateways that an Inference Gateway may be sent to; a name stands for all of its addresses."""
    redis: RedisAddress = field(default_factory=lambda: RedisAddress(url="redis://127.0.0.1:6379/0"))
    cluster: str = "default"
    curve_keys: Path | None = None
    """Key file of the deployment: whose fleet it is, and what the cache salts of tenants are keyed with."""
    api_keys: Path | None = None
    """The gateways' key file; None where they have none."""
    token_file: Path | None = None
    """What front ends must send to use the router's own API; None: nothing."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """PEM files for the gRPC port; None: no TLS."""
    local_prefill_tokens: int = 2048
    policies: PolicyNames = field(default_factory=PolicyNames)
    parse_special_tokens: bool = True
    """Those in text prompts become control tokens; as in the gateways."""
    reservation_ttl_s: float = 600.0
    """A choice that is not released is forgotten after this long."""
    worker_wait_s: float = 1.0
    """A worker has capacity for a prompt if its queue is no longer than this; as in the gateway."""
    max_held: int = 65_536
    """Choices that are not released; the oldest is dropped for one more."""
    max_choosing: int = 256
    """Choices being made at once over the router's own API."""
    max_exchanges: int = 4_096
    """Requests of an Inference Gateway that are followed at once."""
    explain_records: int = 4_096
    tokenizer_threads: int = 2
    """For long texts; short ones have one of their own."""
    drain_notice_s: float = 1.0
    drain_timeout_s: float = 30.0
    log_format: LogFormat = LogFormat.PLAIN
    log_level: int = logging.INFO
