"""The gateway of a model service."""

from typing import Annotated, ClassVar, Literal

import msgspec

from tandem_operator.api.pods import PodOverrides, Resources
from tandem_operator.api.types import HOST_NAME, Annotations, Api, Arguments, Name, Port, Rule, printable


class GatewayLimits(Api, frozen=True, kw_only=True):
    """Limits of the gateway's queue and memory; docs/limits.md."""

    max_waiting_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """Maximum number of requests that wait for a worker with capacity; more are rejected."""
    queue_timeout_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] | None = None
    """Maximum wait of a request, in seconds; then it is rejected."""
    max_body_memory_mib: Annotated[int, msgspec.Meta(ge=1, le=1_048_576)] | None = None
    """Memory for request bodies in flight of all clients, in MiB; more are rejected."""
    max_body_memory_per_client_mib: Annotated[int, msgspec.Meta(ge=1, le=1_048_576)] | None = None
    """The same per client, in MiB. A client is a tenant if there are API keys, else an address."""


class ServicePort(Api, frozen=True, kw_only=True):
    """The Service of the gateway."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Kind of Service."""
    port: Port = 80
    """Port that clients use."""
    annotations: Annotations = {}
    """Annotations, for load balancers of clouds."""


class ParentRef(Api, frozen=True, kw_only=True):
    """A Gateway of the Gateway API."""

    name: Name
    """Its name."""
    namespace: Name | None = None
    """Its namespace; empty: the same."""
    section_name: Name | None = None
    """Its listener."""


GatewayDuration = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$", max_length=32)]
"""Duration of the Gateway API (GEP-2257): 30s, 1h30m; 0s is no limit."""


class RouteTimeouts(Api, frozen=True, kw_only=True):
    """Timeouts of the Gateway. Without them its defaults apply, which end long streams."""

    request: GatewayDuration = "0s"
    """From the start of a client's request to the end of the response, streams included; 0s: no limit."""
    backend_request: GatewayDuration = "0s"
    """Timeout of one attempt at a gateway pod; 0s: no limit."""

    RULES: ClassVar = (
        Rule(
            "!has(self.request) || !has(self.backendRequest) || duration(self.request) == duration('0s') || "
            "duration(self.backendRequest) <= duration(self.request)",
            "backendRequest is longer than request, which ends an attempt; lower it, or set it to 0s",
        ),
    )


class HttpRoute(Api, frozen=True, kw_only=True):
    """An HTTPRoute to the gateway's Service, where the Gateway API is installed."""

    parent_refs: Annotated[list[ParentRef], msgspec.Meta(min_length=1, max_length=8)]
    """Gateways to which it attaches."""
    hostnames: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=f"^{HOST_NAME}$", max_length=253)]],
        msgspec.Meta(max_length=16),
    ] = []
    """Host names that it serves."""
    timeouts: RouteTimeouts = RouteTimeouts()
    """Time limits (Gateway API 1.2 or later)."""


class InferencePool(Api, frozen=True, kw_only=True):
    """An InferencePool of the gateways, with a router as its endpoint picker.

    Requires the Gateway API Inference Extension. An HTTPRoute of this service then names the pool.
    """

    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Router pods; all of them are active."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"
    """Handling of requests while no router responds. FailOpen: they go to a gateway, which selects the workers."""
    resources: Resources = Resources(requests={"cpu": "500m", "memory": "512Mi"}, limits={"memory": "1Gi"})
    """Resources of one router."""
    pod: PodOverrides = PodOverrides()
    """Changes to its pods."""


class Gateway(Api, frozen=True, kw_only=True):
    """The gateway, which serves the HTTP API."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1
    """Gateway pods. Two or more survive the loss of one."""
    processes: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = None
    """Processes of one gateway pod, each of which uses one CPU; default: 1. More replicas are the better choice where
    pods may be small. `resources` are those of all processes together."""
    auth_secret: Name | None = None
    """Secret whose keys are files of hashed API keys (`tandem keys`); without it no key is required."""
    limits: GatewayLimits = GatewayLimits()
    """Limits of the request queue and of memory."""
    router_policy: Annotated[str, printable(max_length=128)] | None = None
    """Policy that selects workers; one policy, or prefill=POLICY,decode=POLICY."""
    router_exploration: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Share of requests that measure workers of which little is known."""
    local_prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Number of uncached prompt tokens up to which decode workers compute prompts themselves."""
    prefill_fallback: bool | None = None
    """Whether decode workers compute prompts while no prefill worker is available; default: true."""
    tool_call_parser: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]+$", max_length=64)] | None = None
    """Format of tool calls; default: detected from the chat template."""
    reasoning_parser: Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]+$", max_length=64)] | None = None
    """Format of reasoning; default: detected from the chat template."""
    tokenizer: Literal["workers", "model"] | None = None
    """Source of the tokenizer. workers: they send it, and gateway pods have no volume and no download of the model.
    model: the source of the model, which gateways need not have workers for. Default: workers, unless the model is a
    path in the image, or on a claim that its ModelGateway mounts."""
    console: bool | None = None
    """Serve the console; default: true."""
    strict_fields: bool = False
    """Reject requests with unknown fields."""
    parse_special_tokens: bool = True
    """Special tokens in text prompts become control tokens; false: they are plain text in every request."""
    allowed_hosts: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=rf"^(\*|{HOST_NAME})$", max_length=253)]],
        msgspec.Meta(max_length=64),
    ] = []
    """Host names of requests, in addition to addresses and names of Services; * for any. Empty: those of httpRoute, or
    any if API keys are required or the names are unknown (a load balancer, an InferencePool)."""
    service: ServicePort = ServicePort()
    """Its Service."""
    http_route: HttpRoute | None = None
    """HTTPRoute to the gateway."""
    inference_pool: InferencePool | None = None
    """InferencePool of the gateways, for Inference Gateways."""
    resources: Resources = Resources(requests={"cpu": "500m", "memory": "1Gi"}, limits={"memory": "2Gi"})
    """Resources of one gateway."""
    pod: PodOverrides = PodOverrides()
    """Changes to its pods."""
    args: Arguments = []
    """Further flags of `tandem gateway`, each one word: --flag or --flag=value. An init container checks them before
    the gateway starts. Flags that have a field, and those that the operator sets, are rejected."""

    RULES: ClassVar = (
        Rule(
            "!has(self.routerPolicy) || self.routerPolicy.matches('^((prefill|decode)=)?"
            "(locality|round_robin|least_loaded|power_of_two|session)"
            "(,(prefill|decode)=(locality|round_robin|least_loaded|power_of_two|session))?$')",
            "routerPolicy is locality, round_robin, least_loaded, power_of_two or session, or prefill=P,decode=P",
        ),
    )
