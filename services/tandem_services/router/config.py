"""How a router is set up, and what it counts."""

from collections import Counter
from dataclasses import dataclass, field

from tandem_services.common.redis_client import ROUTING_TIMEOUT_S, RedisAddress
from tandem_services.router.choice import Placement
from tandem_services.router.deployment import Deployment
from tandem_services.router.policies.by_role import PolicyNames

LOCAL_PREFILL_TOKENS = 2048
"""A longer prompt would keep a decode worker from decoding for too long, whatever the prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Of one fleet."""

    redis: RedisAddress
    cluster: str = "default"
    deployment: Deployment = field(default_factory=Deployment)
    """Whose rows count, and whose namespace it is."""
    local_prefill_tokens: int = LOCAL_PREFILL_TOKENS
    """A decode worker computes a prompt alone where that is predicted to be faster and it lacks no more tokens than
    this; 0: only when no prefill worker can."""
    policies: PolicyNames = field(default_factory=PolicyNames)
    """Who is left for the price to choose among, by role."""
    exploration: float = 0.0
    """Share of requests that go to workers at random, so that what is never chosen stays known."""
    told_per_second: int = 0
    """Most decisions of a second that tell what they chose from (`Choice.priced`)."""
    routing_timeout_s: float = ROUTING_TIMEOUT_S
    start_timeout_s: float = 30.0
    """How long `start` waits for Redis."""


@dataclass(kw_only=True, slots=True)
class RouterCounters:
    """Since start, for the metrics endpoint."""

    redis: int = 0
    local: int = 0
    none: int = 0
    placements: Counter[Placement] = field(default_factory=Counter)
    rubbish: int = 0
    """Values in Redis that made no sense [redis-values-untrusted]."""
    refresh_failures: int = 0
