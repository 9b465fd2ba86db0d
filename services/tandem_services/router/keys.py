"""Every Redis key and every time-to-live of the router's state in Redis, each with its reason.

All keys start with `tandem:{cluster}:` and, where the deployment has a key file, the digest of its secret and another
colon (`router.deployment`), so that deployments with one cluster name and different keys do not meet. The braces are a
hash tag, so on a Redis Cluster all keys of one cluster name share a slot and one Function may touch them.

    fleet                HASH  incarnation → routing row (scripts/fleet_row.lua) with its reservations
    kinds:<model>        ZSET  compat hash of a model's workers → when one was described last (scripts/ranks.lua)
    least:<model>:<compat>:<role>  ZSET  incarnation → seconds that a request would cost there
    owner                HASH  worker_id → the incarnation that holds the name, and its claim (router.deployment)
    worker:<worker_id>   HASH  the same worker for gateways, peers, people and the operator: readable fields, signed
    fenced:<incarnation> STR   why it is over for good: a verdict (router.deployment)
    changes              ZSET  incarnation → generation of its last change (scripts/changes.lua)
    starting             HASH  worker_id → what a worker does that is not registered yet (scripts/starting.lua)
    meta                 HASH  epoch, generation, last_call, swept_at, grace_until; ranked_at, unpublished: when a sweep
                               last looked at all ranks, and how many workers are of a release without `holders`;
                               missed_at, missed: when a decision without candidates wrote ranks, of which model and
                               generation
    blocks:<incarnation> SET   16-byte digests of the blocks in that worker's prefix cache
    host:<incarnation>   SET   those of them that are in host memory alone, not on the device
    cursor:<incarnation> STR   revision of the last index update that was applied to the two sets above
    holders:<3 digits>   HASH  digest of a block → tags of workers that have it (scripts/holders.lua)
    tags                 HASH  tag → incarnation
    links:<incarnation>  STR   lines of a receiver's incarnation, a space and the seconds to move one token's KV to it
    quarantine           ZSET  digest of a request that crashes workers → when it may be forgotten
    adapters             HASH  model and name of an adapter, registered or of a worker's flags → its content, signed
    tokenizer:<digest>   STR   of a model: the files of its tokenizer, compressed, and their signed digest
    usage:<tenant>       HASH  requests and tokens of one API key's last minute, by second (scripts/usage.lua)
    running:<tenant>     ZSET  request of it that runs → end of its lease
    fair                 HASH  tenant → virtual tokens it has had (scripts/fair.lua)
    backlog              ZSET  tenant that waits at some gateway → until when that counts
    wishes               HASH  gateway → until when that counts, the priority and tenant its next slot is for
    places               STR   until when that counts, and how many places gateways have left to others
    session:<digest>     STR   which worker keeps a conversation, how long it is and what it ends with; lives as long
                               as the session is kept, by the gateway's --session-ttl
    ticket:<id>          STR   a choice that a stand-alone router has made for a gateway to carry out; lives as long as
                               its reservation counts

Why one set per incarnation and not only an index by block: the entries of a dead incarnation vanish with one UNLINK or
one expiry, publishing n blocks is one SADD, and releases before read them. A routing decision looks up the match of
each candidate there. `holders` has few of the blocks and only finds candidates, so it need not be exact.

docs/redis.md lists the commands, as an ACL rule that tests use: those inside functions, and from clients FCALL,
PING, for sessions GET, SET and UNLINK, for tickets SET and GETDEL, for tokenizers STRLEN GET SET PEXPIRE, for the
quarantine TIME TYPE ZADD ZRANGE ZREM ZREMRANGEBYRANK PEXPIRE UNLINK, and FUNCTION LOAD unless an administrator loads
the library (`router.redis_functions`).
"""

import re
from dataclasses import dataclass
from hashlib import blake2b

from tandem_engine.base.errors import ConfigError

HEARTBEAT_S = 1.0
"""How often a worker reports and a gateway refreshes its view."""

LEASE_MS = 3_000
"""Three heartbeats: one may be lost and one late before a worker is no longer offered."""

FENCE_AFTER_MS = 10_000
"""Without a heartbeat for this long an incarnation loses its row and its index entries, and its peers ask whether it
lives: one that does not answer them is fenced for good. Longer than the lease, because being fenced costs a restart."""

FENCED_MEMORY_MS = 3_600_000
"""A fenced incarnation is recognized for an hour: longer than any process stays suspended by accident."""

INDEX_TTL_MS = 60_000
"""Blocks outlive the lease, so that a short loss of Redis costs no replay. Every description of the worker and
every index update refreshes them."""

FLEET_TTL_MS = 3_600_000
"""The shared hashes are removed an hour after the last worker of a cluster has gone."""

RESERVATION_MS = 2_000
"""A request has reached its worker and is in that worker's report by then (delivery, 0.5 s statistics,
1 s heartbeat). Later the reservation would only count it twice."""

RESERVATION_BUCKET_MS = 250
"""Reservations of one worker are summed per quarter second: no key per request, nothing to sweep."""

SWEEP_EVERY_MS = 1_000
"""Dead rows are swept once a second by the first caller, not in every heartbeat."""

NOTED_EVERY_MS = 250
"""`last_call` is written so often: it tells whether there was a call within a lease."""

SWEEP_STEP = 512
"""Incarnations retired in one sweep, so that no call blocks Redis for long."""

MAX_REGISTERED = 8192
"""Entries of adapters in Redis, those that were removed included."""

ALL_UP_TO = 24
"""Workers of a model with no more are all candidates of each decision (scripts/candidates.lua)."""

MIXED_UP_TO = 256
"""As many are candidates while some workers are of a release without an index by block: pricing all of a larger fleet
would cost more than that release's own decisions."""

MET_HOLDERS = 32
"""Workers with a prefix of the prompt that a decision compares, to price the most promising."""

MORE_DECODES = 16
"""Further workers by load that a decision prices where fewer than two candidates have capacity."""

RANKED_TOKENS = 1024
"""A worker's rank for prompts is what one of so many tokens, none of them cached, would cost there."""

MAX_RANKED_PAGE = 256
"""Names of a rank that one command reads."""

RANK_AGAIN_MS = 1_000
"""A decision without any candidate writes the ranks of its model again, at most so often, or ten times as often while
workers join or several models are missed: Redis lost them, or workers of a release without ranks have just joined."""

HOLDER_TOKENS = 128
"""One block of about so many tokens of a prompt is in the index by block. Candidates are found by it, and matches are
exact all the same, so a finer one costs more and finds hardly better ones."""

MAX_SAMPLING = 128
"""At least one of so many blocks is in the index by block: the last byte of a digest decides."""

TAG_BYTES = 4
"""A short name of an incarnation in the index by block."""

MAX_HOLDERS = 64
"""Workers that the index by block names for one block: a decision compares half as many."""

MAX_BUCKET_FIELDS = 16_384
"""A hash of the index by block with more was not written by workers: there are 4,096 of them."""

SWEPT_BUCKETS = 16
"""Hashes of the index by block that the sweep of a second looks into: each of them every four minutes."""

SWEPT_FIELDS = 32
"""Blocks of each of these. Two milliseconds a second in all."""

SWEPT_TAGS = 4
"""Holders of each of these."""

MAX_WORKERS = 16_384
"""One more is rejected. Rows beyond it were not written by workers: they are removed, and the workers stay."""

SMALL_FLEET = 32
"""Workers of a fleet in which every heartbeat describes its worker and every view all workers: 2 ms of Redis a second,
and 1 ms for each gateway. In a larger fleet both cost no more, and what changes by itself is older."""

DESCRIBE_EVERY_S = 30.0
"""How often a worker of a large fleet describes itself to Redis although nothing of it has changed."""

DESCRIBED_TTL_MS = 90_000
"""Three of these."""

MAX_CHANGES = 4_096
"""Incarnations whose last change is known. Readers that missed more read the whole fleet."""

MAX_DESCRIBED = 256
"""Workers that one call describes: 7 ms of Redis."""

MAX_ROW_FIELDS = 128
"""Fields of the readable hash of a worker. A hash with more was not written by a worker."""

STARTING_MS = 10_000
"""A worker that starts is forgotten this long after its last report: ten of its reports."""

MAX_STARTING = 256
"""Workers of a cluster that are listed while they start: as many as the console shows."""

MAX_GATEWAYS = 1_024
"""More queue heads than this are malformed data."""

MAX_PLACES = 65_536
"""More places than this are malformed data."""

LEASE_OF_REQUEST_MS = 30_000
"""A running request of a gateway that died counts against its tenant's concurrency for at most this long."""

QUEUE_HEAD_TTL_MS = 1_000
"""A gateway's queue head counts this long after its last report: five of its reports."""

YIELDED_SLOT_TTL_MS = 1_000
"""Places that gateways have left to others are forgotten this long after the last one was left: by then workers have
reported their capacity. An unused one may therefore live for as long as others are left each second."""

BACKLOG_MS = 2_000
"""A tenant counts as waiting this long after a gateway's last report of it: ten of its reports."""

MAX_CHAIN_BLOCKS = 65_536
"""Blocks of a prompt that are hashed for routing."""

MAX_NAMED_BLOCKS = 128
"""Max. blocks that a routing call names: each 2nd, 4th, 8th … one and the last one. The cached part of a longer prompt
is known to 1.6 % of it, more precise than the rates of its price, and a call is 2 KiB instead of up to 1 MiB."""

DIGEST_BYTES = 16
"""Size of the digest of a block."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one deployment. Raises `ConfigError` for a cluster name that cannot be part of a key."""

    cluster: str
    namespace: str = ""
    """See `Deployment.namespace`."""

    def __post_init__(self) -> None:
        check_name("--cluster", self.cluster)

    @property
    def prefix(self) -> str:
        return f"tandem:{{{self.cluster}}}:" + (f"{self.namespace}:" if self.namespace else "")

    @property
    def shared(self) -> tuple[str, ...]:
        """KEYS of every registry function, in the order the scripts expect."""
        return tuple(self.prefix + name for name in ("fleet", "owner", "meta"))

    @property
    def starting(self) -> str:
        return self.prefix + "starting"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def fenced(self, incarnation: str) -> str:
        return f"{self.prefix}fenced:{incarnation}"

    def blocks(self, incarnation: str) -> str:
        return f"{self.prefix}blocks:{incarnation}"

    def host_blocks(self, incarnation: str) -> str:
        return f"{self.prefix}host:{incarnation}"

    def cursor(self, incarnation: str) -> str:
        return f"{self.prefix}cursor:{incarnation}"

    @property
    def quarantine(self) -> str:
        return self.prefix + "quarantine"

    @property
    def adapters(self) -> str:
        return self.prefix + "adapters"

    def tokenizer(self, model: str) -> str:
        digest = blake2b(model.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
        return f"{self.prefix}tokenizer:{digest}"

    def usage_of(self, tenant: str) -> tuple[str, str]:
        """KEYS of the usage functions."""
        return f"{self.prefix}usage:{tenant}", f"{self.prefix}running:{tenant}"

    @property
    def fairness(self) -> tuple[str, ...]:
        """KEYS of the fairness function."""
        return tuple(self.prefix + name for name in ("fair", "backlog", "wishes", "places"))

    def session(self, digest: str) -> str:
        return f"{self.prefix}session:{digest}"

    def ticket(self, ticket_id: str) -> str:
        return f"{self.prefix}ticket:{ticket_id}"


def check_name(what: str, name: str) -> None:
    """Raise `ConfigError` unless `name` is 1–128 letters, digits, dots, dashes or underscores."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{what} must be 1 to 128 letters, digits, dots, dashes or underscores, got {name[:200]!r}")


def worker_id_of(incarnation: str) -> str:
    """`worker_id` of `worker_id@number`."""
    return incarnation.rpartition("@")[0]
