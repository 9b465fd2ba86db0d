"""The parts of a gateway, composed of its configuration and the fleets that it serves. `app` has its routes."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from tandem_engine.clock import Clock
from tandem_services.common.allowed_hosts import AllowedHosts
from tandem_services.common.health import Health
from tandem_services.common.metrics import MetricFamilies, new_registry
from tandem_services.common.order_access import OrderAccess
from tandem_services.common.order_token import token_for
from tandem_services.gateway.access.access_metrics import AccessMetrics
from tandem_services.gateway.access.authentication import Access
from tandem_services.gateway.access.deployment_secret import cache_secret, deployment_secret
from tandem_services.gateway.access.key_watch import KeyWatch
from tandem_services.gateway.access.tenant_limits import Board as UsageBoard
from tandem_services.gateway.access.tenant_limits import TenantLimits
from tandem_services.gateway.answering import Answering
from tandem_services.gateway.body_budget import BodyBudget
from tandem_services.gateway.config import GatewayConfig
from tandem_services.gateway.engine_client import LivenessTiming
from tandem_services.gateway.metrics import PREFIX, HttpMetrics
from tandem_services.gateway.model_catalog import ModelCatalog
from tandem_services.gateway.model_service import Fleet, ModelService, Shared, build_model_service
from tandem_services.gateway.operations import METRICS_PATH
from tandem_services.gateway.request_journal import RequestJournal
from tandem_services.gateway.request_trace import Traces, pass_on
from tandem_services.gateway.tokenizer_threads import TokenizerThreads

if TYPE_CHECKING:
    from tandem_services.common.span_export import SpanExport


@dataclass(frozen=True, kw_only=True, slots=True)
class Gateway:
    """The parts of a gateway that routes use."""

    registry: CollectorRegistry
    metrics: HttpMetrics
    models: ModelCatalog
    shared: Shared
    """What its model services are lent."""
    tokenizing: TokenizerThreads
    answering: Answering
    bodies: BodyBudget
    """Of all its ports."""
    access: Access | None
    """None: everybody may do everything."""
    order_access: OrderAccess
    """What orders on the administrators' port need."""
    hosts: AllowedHosts
    """That requests may be for, on either port."""
    health: Health
    clock: Clock
    traces: Traces
    strict_fields: bool
    """Requests with fields that nobody knows are refused."""

    def build_service(self, fleet: Fleet) -> ModelService:
        """One more model service, of `fleet`. Whoever makes it known to `models` starts it before."""
        return build_model_service(fleet if self.access is not None else _unshared(fleet), self.shared)

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs as long as the gateway serves beside its model services, by name."""
        if self.access is None:
            return {}
        return {"api keys": self.access.keys.run(), "leases of requests": self.access.limits.run()}

    async def close(self) -> None:
        """Stop what the gateway itself started. Running requests have ended."""
        for service in self.models:
            await service.close()
        if self.access is not None:
            await self.access.limits.close()
        self.tokenizing.close()


def build_gateway(
    config: GatewayConfig,
    fleets: Sequence[Fleet],
    *,
    clock: Clock,
    health: Health,
    usage: UsageBoard | None = None,
    spans: "SpanExport | None" = None,
) -> Gateway:
    """Compose the parts. The caller owns what it passes, and closes it after the gateway. `spans`: where traces go.

    `fleets` are those of `config.models`; `usage` is what all gateways share of it, None where this one is alone.

    Raises `ConfigError` for a key file that is no good.
    """
    registry = new_registry()
    families = MetricFamilies(registry)
    tokenizing = TokenizerThreads(long_threads=config.tokenizer_threads)
    shared = Shared(
        clock=clock,
        families=families,
        tokenizing=tokenizing,
        timing=LivenessTiming(ping_interval_s=config.ping_interval_s, unanswered_pings=config.unanswered_pings),
        turn_s=config.request_timeout_s,
    )
    known = fleets if config.api_keys is not None else [_unshared(fleet) for fleet in fleets]
    models = ModelCatalog([build_model_service(fleet, shared) for fleet in known])
    bodies = BodyBudget(most=config.bodies_bytes, most_per_client=config.bodies_bytes_per_client)
    metrics = HttpMetrics(families)
    metrics.watch_bodies(lambda: bodies.held)
    first = fleets[0]
    listening = (config.host,) if config.admin_port is None else (config.host, config.admin_host)
    hosts = AllowedHosts.of(config.allowed_hosts, listening=listening)
    secret = deployment_secret(first.context.keys, first.config.cluster)
    health.add_check("workers", lambda: _missing_workers(models))
    return Gateway(
        registry=registry,
        metrics=metrics,
        models=models,
        shared=shared,
        tokenizing=tokenizing,
        answering=Answering(
            journal=RequestJournal(config.explain_records), clock=clock, timeout_s=config.request_timeout_s
        ),
        bodies=bodies,
        access=_access(config, registry, usage, secret, clock),
        order_access=OrderAccess(token=token_for(first.context.keys), hosts=hosts),
        hosts=hosts,
        health=health,
        clock=clock,
        traces=_traces(models, registry, spans, clock),
        strict_fields=config.strict_fields,
    )


def _unshared(fleet: Fleet) -> Fleet:
    """Without keys there is one tenant, and nothing to share out."""
    return replace(fleet, fairness=None)


def _traces(models: ModelCatalog, registry: CollectorRegistry, spans: "SpanExport | None", clock: Clock) -> Traces:
    if spans is None:
        return pass_on
    from tandem_services.common.span_export import SpanMetrics
    from tandem_services.gateway.request_spans import GatewayTraces

    registry.register(SpanMetrics(PREFIX, spans.counts))
    return GatewayTraces(tracer=spans.tracer, clock=clock, policies_of=models.policies_of)


def _missing_workers(models: ModelCatalog) -> str | None:
    """A gateway is of use as long as one of its models is served, or would be as soon as somebody asks."""
    of_use = any(service.model.context_length or service.model.from_zero for service in models)
    return None if of_use else "no worker is registered"


def _access(
    config: GatewayConfig, registry: CollectorRegistry, board: UsageBoard | None, secret: bytes, clock: Clock
) -> Access | None:
    if config.api_keys is None:
        return None
    metrics = AccessMetrics(registry)
    keys = KeyWatch(path=config.api_keys, metrics=metrics)
    keys.start()
    return Access(
        keys=keys,
        limits=TenantLimits(clock=clock, metrics=metrics, board=board),
        metrics=metrics,
        cache_secret=cache_secret(secret),
        admin_paths=(METRICS_PATH,),
    )
