"""Configuration of trace export, without OpenTelemetry's packages: `span_export` imports those."""

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.release import DISTRIBUTION
from tandem_services.common.errors import StartupError

PROTOCOL = "http/protobuf"
TRACES_PATH = "/v1/traces"

LAST_SPANS_S = 2.0
"""The end of a process waits so long for the collector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracingConfig:
    """Raises `ConfigError` for an endpoint, protocol or share that cannot work."""

    endpoint: str
    """URL of the collector; without a path its standard one is meant."""
    protocol: str = PROTOCOL
    sample_ratio: float | None = None
    """Of traces that begin here; None: the value of OTEL_TRACES_SAMPLER, or all."""
    max_waiting_spans: int = 2048
    """Further ones are dropped until some are sent."""

    def __post_init__(self) -> None:
        if self.protocol != PROTOCOL:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL {self.protocol[:50]!r} is not spoken here: set it to {PROTOCOL} and name "
                "the collector's HTTP port, mostly 4318"
            )
        try:
            parts = urlsplit(self.endpoint)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(
                f"--otlp-traces-endpoint {self.endpoint[:200]!r} is not a URL like http://collector:4318{TRACES_PATH}"
            )
        if self.sample_ratio is not None and not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError(f"--otlp-traces-sample-ratio must be between 0 and 1, got {self.sample_ratio}")

    @property
    def url(self) -> str:
        """Where batches are posted."""
        parts = urlsplit(self.endpoint)
        return self.endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path=TRACES_PATH))


def require_opentelemetry() -> None:
    """Raise `StartupError` where OpenTelemetry's packages are not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        # Versions of xds-protos up to 1.85 at least write an old copy of it over this package (grpc/grpc#42926).
        broken = "InstrumentationScope" in str(error)
        fix = "--force-reinstall --no-deps opentelemetry-proto" if broken else f"'{DISTRIBUTION}[otel]'"
        raise StartupError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install {fix}, or set "
            "OTEL_TRACES_EXPORTER=none if only the environment enables traces"
        ) from error
