"""Metrics about keys and limits. Tenants are named by the key file, so their number is bounded by it."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class AccessMetrics:
    """All series about access of one gateway, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants = Gauge("tandem_gateway_api_key_tenants", "Tenants of the key file in use", registry=registry)
        self._stale = Gauge(
            "tandem_gateway_api_keys_stale",
            "1 while the key file is no good and the former keys are used",
            registry=registry,
        )
        self._reloads = Counter(
            "tandem_gateway_api_key_reloads_total", "Key files read, by outcome", ["outcome"], registry=registry
        )
        self._failures = Counter(
            "tandem_gateway_authentication_failures_total",
            "Requests refused because of their key",
            ["reason"],
            registry=registry,
        )
        self._limited = Counter(
            "tandem_gateway_requests_limited_total",
            "Requests refused by a limit of their tenant",
            ["tenant", "limit"],
            registry=registry,
        )
        self._tokens = Counter(
            "tandem_gateway_tenant_tokens_total",
            "Prompt and output tokens of ended requests",
            ["tenant"],
            registry=registry,
        )
        self.local_decisions = Counter(
            "tandem_gateway_limits_local_total",
            "Limits decided by this gateway alone, because Redis was away",
            registry=registry,
        )

    def keys_loaded(self, tenants: int) -> None:
        self._tenants.set(tenants)
        self._stale.set(0)
        self._reloads.labels(outcome="loaded").inc()

    def keys_refused(self) -> None:
        self._stale.set(1)
        self._reloads.labels(outcome="refused").inc()

    def refused(self, reason: str) -> None:
        self._failures.labels(reason=reason).inc()

    def limited(self, tenant: str, limit: str) -> None:
        self._limited.labels(tenant=tenant, limit=limit).inc()

    def used(self, tenant: str, tokens: int) -> None:
        self._tokens.labels(tenant=tenant).inc(tokens)
