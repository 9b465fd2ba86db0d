"""Redis as it is rented: servers that act as one, each of them a real process.

    async with redis_pair() as pair:              a primary and its replica behind one address
    async with redis_cluster(folder) as cluster:  three primaries, each with a replica
    async with redis_sentinels(folder) as watch:  a primary, its replica, and three Sentinels

All end with the block.
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tandem_services.common.sockets import free_port
from tandem_testing.redis_server import RedisServer
from tandem_testing.tcp_proxy import TcpProxy
from tandem_testing.waiting import until

UP_S = 60.0
REPLICATED = ("--repl-diskless-sync-delay", "0")
SERVICE = "main"
QUIET_MS = 3_600_000
"""No Sentinel takes a server for dead, however long a machine stalls: failovers are made by commands."""
ORDERED = ("--cluster-node-timeout", "10000", "--cluster-replica-no-failover", "yes")
"""Failovers are made by commands. A longer timeout repeats a lost message of a node that joins too late."""

BeforeExec = Callable[[], None] | None


def grant(servers: Iterable[RedisServer], rules: Iterable[str], *, user: str, password: str) -> None:
    """ACLs are not replicated: each server has its own."""
    for server in servers:
        reply = server.command("ACL", "SETUSER", user, "reset", "on", f">{password}", *rules)
        assert reply.startswith("+OK"), reply


async def in_step(primary: RedisServer, replica: RedisServer) -> None:
    """Wait until the replica has what the primary has."""
    await until(lambda: "master_link_status:up" in replica.command("INFO", "replication"), UP_S, "a replica")
    await until(lambda: "1" in primary.command("WAIT", "1", "100"), UP_S, "the replica has all writes")


@dataclass(kw_only=True)
class RedisPair:
    """A primary and its replica behind one address, as a managed Redis without the cluster protocol."""

    primary: RedisServer
    replica: RedisServer
    proxy: TcpProxy

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def fail_over(self) -> None:
        """Promote the replica; the former primary becomes its replica and keeps its connections."""
        self.replica.command("REPLICAOF", "NO", "ONE")
        self.primary.command("REPLICAOF", self.replica.host, str(self.replica.port))
        self.primary, self.replica = self.replica, self.primary

    async def in_step(self) -> None:
        await in_step(self.primary, self.replica)


def start_replica(primary: RedisServer, *options: str, before_exec: BeforeExec = None) -> RedisServer:
    place = f"{primary.host} {primary.port}"
    return RedisServer.start(*REPLICATED, *options, "--replicaof", place, before_exec=before_exec)


@contextlib.asynccontextmanager
async def redis_pair(*, before_exec: BeforeExec = None) -> AsyncIterator[RedisPair]:
    primary = RedisServer.start(*REPLICATED, before_exec=before_exec)
    replica = start_replica(primary, before_exec=before_exec)
    try:
        proxy = await TcpProxy.open(lambda: (made.primary.host, made.primary.port))
        made = RedisPair(primary=primary, replica=replica, proxy=proxy)
        yield made
        await proxy.close()
    finally:
        primary.stop()
        replica.stop()


@dataclass(kw_only=True)
class RedisCluster:
    """Nodes that share the slots."""

    primaries: list[RedisServer] = field(default_factory=list)
    replicas: list[RedisServer] = field(default_factory=list)

    @property
    def nodes(self) -> list[RedisServer]:
        return [*self.primaries, *self.replicas]

    def url(self, *nodes: RedisServer, scheme: str = "redis+cluster") -> str:
        """By these of its nodes."""
        return f"{scheme}://" + ",".join(f"{node.host}:{node.port}" for node in nodes)

    def owner(self, key: str) -> RedisServer:
        """As the nodes that answer agree."""
        owners = [node for node in self.alive if not node.command("GET", key).startswith("-MOVED")]
        (owner,) = owners
        return owner

    @property
    def alive(self) -> list[RedisServer]:
        return [node for node in self.nodes if node.process is not None and node.process.poll() is None]

    def replica_of(self, primary: RedisServer) -> RedisServer:
        identity = node_id(primary)
        return next(node for node in self.replicas if own_line(node).split()[3] == identity)

    async def take_over(self, key: str) -> RedisServer:
        """The owner of `key` dies, its replica is promoted without a vote; the new owner, once all agree."""
        owner = self.owner(key)
        replica = self.replica_of(owner)
        await in_step(owner, replica)
        owner.kill()
        assert replica.command("CLUSTER", "FAILOVER", "TAKEOVER").startswith("+OK")
        await self.is_taken_over(key, replica)
        return replica

    async def is_taken_over(self, key: str, owner: RedisServer) -> None:
        """Wait until all other nodes redirect to `owner`."""
        others = [node for node in self.alive if node is not owner]
        moved = f":{owner.port}"
        await until(lambda: all(moved in node.command("GET", key) for node in others), UP_S, "all have the new owner")

    def slot(self, key: str) -> str:
        return self.primaries[0].command("CLUSTER", "KEYSLOT", key).strip()[1:]

    def begin_move(self, key: str, taker: RedisServer) -> None:
        """From now on the owner serves the keys that it has, and the taker those that have been moved."""
        owner, slot = self.owner(key), self.slot(key)
        taker.command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(owner))
        owner.command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(taker))

    def move_keys(self, owner: RedisServer, taker: RedisServer, slot: str) -> None:
        """All keys of the slot."""
        while keys := _keys_in(owner, slot):
            for key in keys:
                reply = owner.command("MIGRATE", taker.host, str(taker.port), key, "0", "10000")
                assert reply.startswith(("+OK", "+NOKEY")), reply

    def end_move(self, owner: RedisServer, taker: RedisServer, slot: str) -> None:
        for node in (taker, owner, *self.primaries):
            if node in self.alive:
                node.command("CLUSTER", "SETSLOT", slot, "NODE", node_id(taker))


def _keys_in(owner: RedisServer, slot: str) -> list[str]:
    listed = owner.command("CLUSTER", "GETKEYSINSLOT", slot, "1000").split("\r\n")
    return [line for line in listed if line.startswith("tandem:")]


def node_id(node: RedisServer) -> str:
    return node.command("CLUSTER", "MYID").split("\r\n")[1]


def own_line(node: RedisServer) -> str:
    return next(line for line in node.command("CLUSTER", "NODES").split("\n") if "myself" in line)


@contextlib.asynccontextmanager
async def redis_cluster(
    folder: Path, *options: str, replicas: int = 1, before_exec: BeforeExec = None
) -> AsyncIterator[RedisCluster]:
    """Three primaries, and `replicas` of each. `options` of all; none: failovers are made by commands."""
    cluster, numbers = RedisCluster(), itertools.count()

    def start() -> RedisServer:
        files = ("--cluster-enabled", "yes", "--cluster-config-file", str(folder / f"node-{next(numbers)}.conf"))
        bus = ("--cluster-port", str(free_port()))
        return RedisServer.start(*files, *bus, *REPLICATED, *(options or ORDERED), before_exec=before_exec)

    try:
        for first, last in ((0, 5460), (5461, 10922), (10923, 16383)):
            cluster.primaries.append(start())
            cluster.primaries[-1].command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
        cluster.replicas += [start() for _ in range(3 * replicas)]
        for epoch, node in enumerate(cluster.nodes, 1):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", str(epoch))
        await _meet(cluster)
        for number, replica in enumerate(cluster.replicas):
            reply = replica.command("CLUSTER", "REPLICATE", node_id(cluster.primaries[number % 3]))
            assert reply.startswith("+OK"), reply
        await until(lambda: all(map(_is_settled, cluster.nodes)), UP_S, "a cluster")
        linked = "master_link_status:up"
        await until(
            lambda: all(linked in one.command("INFO", "replication") for one in cluster.replicas), UP_S, "replicas"
        )
        yield cluster
    finally:
        for node in cluster.nodes:
            node.stop()


async def _meet(cluster: RedisCluster) -> None:
    for node, other in itertools.permutations(cluster.nodes, 2):
        bus = other.extra[other.extra.index("--cluster-port") + 1]
        node.command("CLUSTER", "MEET", other.host, str(other.port), bus)
    await until(lambda: all(_knows(node, len(cluster.nodes)) for node in cluster.nodes), UP_S, "they meet")


def _knows(node: RedisServer, count: int) -> bool:
    """By their names: one whose handshake has not ended has another name."""
    listed = node.command("CLUSTER", "NODES")
    return f"cluster_known_nodes:{count}\r" in node.command("CLUSTER", "INFO") and "handshake" not in listed


def _is_settled(node: RedisServer) -> bool:
    return "cluster_state:ok" in node.command("CLUSTER", "INFO")


@dataclass(kw_only=True)
class WatchedPair:
    """A primary and its replica, which Sentinels watch."""

    primary: RedisServer
    replica: RedisServer
    sentinels: list[RedisServer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.url_of()

    def url_of(self, *, user: str = "", database: int = 0) -> str:
        hosts = ",".join(f"{one.host}:{one.port}" for one in self.sentinels)
        return f"redis+sentinel://{user}{hosts}/{SERVICE}/{database}"

    async def in_step(self) -> None:
        await in_step(self.primary, self.replica)

    def named_by(self, sentinel: RedisServer) -> str:
        """The reply: host and port of the primary."""
        return sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)

    async def fail_over(self) -> None:
        """The primary dies, and a Sentinel is ordered to promote the replica at once."""
        self.primary.kill()
        await until(lambda: "+OK" in self.sentinels[0].command("SENTINEL", "FAILOVER", SERVICE), UP_S, "a failover")
        await self.is_failed_over()

    async def is_failed_over(self) -> None:
        """Wait until all Sentinels name the former replica."""
        port = f"\r\n{self.replica.port}\r\n"
        await until(lambda: all(port in self.named_by(one) for one in self.sentinels), UP_S, "another primary")
        self.primary, self.replica = self.replica, self.primary


@contextlib.asynccontextmanager
async def redis_sentinels(
    folder: Path, *options: str, down_after_ms: int = QUIET_MS, before_exec: BeforeExec = None
) -> AsyncIterator[WatchedPair]:
    """`options` of primary and replica."""
    primary = RedisServer.start(*REPLICATED, *options, before_exec=before_exec)
    replica = start_replica(primary, *options, before_exec=before_exec)
    watched = WatchedPair(primary=primary, replica=replica)
    try:
        await watched.in_step()
        for number in range(3):
            path = folder / f"sentinel-{number}.conf"
            path.write_text(
                f"sentinel monitor {SERVICE} {primary.host} {primary.port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            watched.sentinels.append(RedisServer.start(sentinel=path, before_exec=before_exec))
        await until(lambda: all(map(_sees_all, watched.sentinels)), UP_S, "the Sentinels have met")
        yield watched
    finally:
        for server in (primary, replica, *watched.sentinels):
            server.stop()


def _sees_all(sentinel: RedisServer) -> bool:
    """Two other Sentinels and a replica."""
    info = sentinel.command("INFO", "sentinel")
    return "slaves=1,sentinels=3" in info
