"""The transfer of KV between prefill and decode workers."""

import math
from dataclasses import dataclass
from enum import StrEnum

from tandem_engine.base.errors import ConfigError
from tandem_engine.base.names import DigestKind, LinkTransport


class Role(StrEnum):
    """What a worker is offered by the router. The engine itself can always do either."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True, slots=True)
class DisaggConfig:
    """Prefill/decode transfer. All durations are seconds of monotonic time.

    Grants and kept prompts are leases: a peer that is alive renews them every `renewal_period`, so a queue
    may be as long as requests' own deadlines allow, and only silence lets them run out. Workers that
    exchange KV should agree on the timeouts, or the shorter lease may lapse between two renewals.
    """

    role: Role = Role.BOTH
    transport: str = "nixl"
    """nixl, or none when the worker only ever serves alone."""
    peer_group: str = ""
    """KV is exchanged with engines of the same group alone: a deployment gives each of its revisions one."""
    grant_timeout: float = 8.0
    """Decode waits this long without a sign of life from the writer, before or after the grant. Prefill lets
    a push take as long, and what its bytes take at 10 MB/s."""
    hold_timeout: float = 8.0
    """Prefill keeps finished pages this long for a grant, or for word that decode still waits for memory."""
    drain_timeout: float = 5.0
    """After an abort decode waits this long for the writer's drain-ack before it quarantines the pages."""
    stall_timeout: float = 10.0
    """A decode engine in which nothing has moved for this long releases the finished prompts that wait for its
    memory: the way out when engines wait for each other in a circle."""
    prefix_fetch_timeout: float = 2.0
    """A request waits no longer than this for a prefix that another worker has, and less where that would not pay."""
    kv_digest: DigestKind = DigestKind.SAMPLED
    """The proof that a worker asks of the pages it is sent."""
    expect_transport: LinkTransport | None = None
    """What links to peers should be carried by, or better. None expects nothing."""
    link_probe_mib: int = 16
    """Largest write of a link's self-test. 0 measures only what requests move."""
    kv_push_layers: int | None = None
    """Layers that prefill sends at once while later ones compute; 0 sends pages once their chunk is settled. None
    goes by bytes: see `disaggregation.prefill.Portions`."""

    @property
    def renewal_period(self) -> float:
        """Seconds between two signs of life: three may be lost before a lease runs out."""
        return min(self.grant_timeout, self.hold_timeout) / 4

    @property
    def question_period(self) -> float:
        """Seconds between two questions about a grant whose end is unknown."""
        return self.renewal_period / 4

    def __post_init__(self) -> None:
        for flag, seconds in (
            ("--grant-timeout", self.grant_timeout),
            ("--hold-timeout", self.hold_timeout),
            ("--prefix-fetch-timeout", self.prefix_fetch_timeout),
        ):
            if not 0.0 < seconds < math.inf:
                raise ConfigError(f"{flag} must be a positive number of seconds, got {seconds}")
