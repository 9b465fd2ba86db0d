"""A whole Tandem of real processes that can be hurt one at a time.

    start     Redis, workers, gateways, each by the command that a pod runs; ready when every gateway routes
    use       over HTTP as clients do; hurt by pid, by knob, by proxy
    keep      a keeper restarts what died, half a second later, as a kubelet does; `no_restarts` stops it
    close     SIGKILL by pid, for everything that was started here; what the kernel kills with us needs no close

`tandem up` starts the same processes. It is not used here because it restarts with pauses that double, starts one
gateway, and puts no proxy between two processes.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem_engine.base.addresses import LOOPBACK, Address
from tandem_engine.base.linux import die_with_parent
from tandem_engine.ipc.keys import KeyPair
from tandem_services.cli.flags import bundled_model
from tandem_services.common.sockets import free_port
from tandem_services.common.tokens import order_token
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys
from tandem_testing.chaos.knobs import ENGINE, RAISED, WORKER, KnobFile
from tandem_testing.chaos.names import NameService
from tandem_testing.chaos.namespaces import Namespace, Switch
from tandem_testing.chaos.parts import Gateway, Part, Worker
from tandem_testing.chaos.worker_main import WorkerSettings
from tandem_testing.metric_text import metric_sum
from tandem_testing.redis_calls import documented_rules
from tandem_testing.redis_fleets import (
    RedisCluster,
    RedisPair,
    WatchedPair,
    grant,
    redis_cluster,
    redis_pair,
    redis_sentinels,
)
from tandem_testing.redis_server import RedisServer
from tandem_testing.system import tandem_command
from tandem_testing.tcp_proxy import TcpProxy
from tandem_testing.waiting import until

REDIS_NAME = "redis.chaos.test"
CLUSTER = "chaos"
NEIGHBOUR = "neighbour"
"""The `--cluster` of the second cell of a fleet with two."""
START_TIMEOUT_S = 400.0
"""A hang, not a promise: a machine with ten times more work than cores takes minutes to load a fleet."""
RESTART_AFTER_S = 0.5
USER, PASSWORD = "tandem", "secret"
"""Of all processes, at a rented Redis."""
DOWN_AFTER_MS = 1_000
"""Sentinels take a server for dead that has not answered for so long."""
KEEPER_POLL_S = 0.05
SHORT_REST = "64"
"""Tokens up to which decode workers may compute themselves; whatever is longer has two workers, at any rates of the
moment."""
ENGINE_FLAGS = (
    *("--threads", "1"),
    # One decode worker alone can carry every stream: what a client waits for is recovery, not room.
    *("--num-pages", "4096"),
    *("--max-running-requests", "128"),
    *("--dtype", "float32"),
    # A long prompt takes several steps, so that there is a middle to interrupt.
    *("--chunked-prefill-size", "256"),
)


class Rented(StrEnum):
    """Redis that consists of several servers."""

    PAIR = "a primary and its replica behind one address"
    SENTINELS = "a primary and its replica, which Sentinels watch"
    CLUSTER = "a cluster"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a fleet consists of."""

    prefill: int = 2
    decode: int = 2
    both: int = 0
    gateways: int = 2
    proxied: bool = False
    """Proxies stand before every worker, and before Redis one for each process."""
    named: bool = False
    """Redis is reached by `REDIS_NAME`, whose address a scenario decides."""
    unconnected: bool = False
    """Gateways connect to workers on first use, as those of a large fleet do (`gateway_main`)."""
    rented: Rented | None = None
    neighbour: bool = False
    """A second cell has as many workers and gateways, and a Redis of its own."""
    wired: bool = False
    """Every worker has a network namespace, and so an address, of its own; KV goes over TCP."""
    engine_flags: tuple[str, ...] = ()
    """Added to `ENGINE_FLAGS`."""
    raising: bool = False
    """Any function of workers and engines may be made to raise (`Worker.faults`); all calls of functions are traced."""

    @property
    def workers(self) -> int:
        return (self.prefill + self.decode + self.both) * (2 if self.neighbour else 1)


@dataclass(kw_only=True, slots=True)
class Fleet:
    """Belongs to one event loop. Use `Fleet.running`."""

    folder: Path
    shape: Shape
    redis: RedisServer
    """Of a rented Redis the server that has the data at the start."""
    rented: RedisPair | WatchedPair | RedisCluster | None = None
    neighbour_redis: RedisServer | None = None
    """Of the second cell."""
    host: str = LOOPBACK
    """Loopback address of every process of a fleet that is not wired."""
    switch: Switch | None = None
    """Of a wired fleet."""
    redis_lines: dict[str, TcpProxy] = field(default_factory=dict)
    """Of a proxied fleet: process, and its way to Redis."""
    workers: list[Worker] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=httpx.Timeout(10.0, pool=None)))
    model: str = "tandem-mini"
    checkpoint: Path = field(default_factory=bundled_model)
    """What is served under that name."""
    _keeper: "asyncio.Task[None] | None" = None
    _restarting: bool = True

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, folder: Path, shape: Shape, host: str = LOOPBACK, *, checkpoint: Path | None = None
    ) -> "AsyncIterator[Fleet]":
        """Raises `AssertionError` with the logs when it does not come up."""
        # From the main thread, like all that shall die with it, and with no moment at which it could be forgotten.
        with contextlib.closing(Switch.open()) if shape.wired else contextlib.nullcontext() as switch:
            async with _rented(shape.rented, folder) as rented:
                redis = _redis(switch, host) if rented is None else _owner(rented)
                fleet = cls(folder=folder, shape=shape, redis=redis, rented=rented, host=host, switch=switch)
                fleet.checkpoint = checkpoint or fleet.checkpoint
                if shape.neighbour:
                    fleet.neighbour_redis = _redis(switch, host)
                async with fleet._served():
                    yield fleet

    @contextlib.asynccontextmanager
    async def _served(self) -> "AsyncIterator[None]":
        try:
            await self.launch()
            await self.all_ready(START_TIMEOUT_S)
            yield
        finally:
            await self.close()

    async def launch(self) -> None:
        """Start every process without waiting for any."""
        keys = KeyPair.generate()
        keys.save(self._keys)
        self.http.headers["Authorization"] = f"Bearer {order_token(keys)}"
        if self.shape.named:
            self.names.start()
            self.names.point(REDIS_NAME, self.redis.host)
        roles = [
            (f"{role}-{n}", role) for role in ("prefill", "decode", "both") for n in range(getattr(self.shape, role))
        ]
        gateways = [f"gateway-{number}" for number in range(self.shape.gateways)]
        if self.shape.proxied:
            for user in (*dict(roles), *gateways):
                line = await TcpProxy.open(lambda: (self.host, self.redis.port), host=self.host)
                self.redis_lines[user] = line
        for name, role in roles:
            await self.add_worker(name, role)
        for name in gateways:
            self.add_gateway(name)
        if self.neighbour_redis is not None:
            place = {"cluster": NEIGHBOUR, "redis_url": self.neighbour_redis.url}
            for name, role in roles:
                await self.add_worker(f"{name}-{NEIGHBOUR}", role, **place)
            for name in gateways:
                self.add_gateway(f"{name}-{NEIGHBOUR}", cell=NEIGHBOUR)
        self._keeper = asyncio.create_task(self._keep())

    async def add_worker(
        self, name: str, role: str, *, kept: bool = True, place: Namespace | None = None, **settings: Any
    ) -> Worker:
        """One more worker; `settings` replace fields of `WorkerSettings`. In a wired fleet it lives in `place`."""
        knobs = KnobFile(path=self.folder / f"{len(self.workers)}-{name}.knobs")
        if self.shape.raising:
            for kind in (ENGINE, WORKER):
                (knobs.path.with_suffix(RAISED) / kind).mkdir(parents=True)
        configured = WorkerSettings(
            worker_id=name,
            role=role,
            model=str(self.checkpoint),
            model_name=self.model,
            redis_url=self._redis_url(name),
            cluster=CLUSTER,
            curve_keys=str(self._keys),
            host=self.host,
            health_port=free_port(self.host),
            request_port=free_port(self.host),
            peer_port=free_port(self.host),
            engine_flags=(*ENGINE_FLAGS, *self.shape.engine_flags, "--crash-dump-folder", str(self.folder)),
            knobs=str(knobs.path),
            clock_file=str(self.clock_file),
        )
        if self.switch is not None:
            place = place or self.switch.place()
            settings |= {"host": place.address}
        request_line, peer_line = None, None
        if self.shape.proxied:
            request_line = await TcpProxy.open(lambda: (self.host, configured.request_port), host=self.host)
            peer_line = await TcpProxy.open(lambda: (self.host, configured.peer_port), host=self.host)
            settings |= {"request_proxy": request_line.port, "peer_proxy": peer_line.port}
        configured = msgspec.structs.replace(configured, **settings)
        file = knobs.path.with_suffix(".json")
        file.write_bytes(msgspec.json.encode(configured))
        argv = [sys.executable, "-m", "tandem_testing.chaos.worker_main", str(file)]
        argv = list(self._placed(argv)) if place is None else place.around(argv)
        part = Part(name=name, argv=argv, log=file.with_suffix(".log"), kept=kept)
        worker = Worker(
            part=part,
            role=role,
            url=Address(configured.host, configured.health_port).url(),
            knobs=knobs,
            settings=configured,
            request_line=request_line,
            peer_line=peer_line,
            place=place,
        )
        part.start()
        self.workers.append(worker)
        return worker

    def add_gateway(
        self, name: str, *, cell: str = CLUSTER, before_exec: Callable[[], None] = die_with_parent
    ) -> Gateway:
        port = free_port(self.host)
        unconnected = [sys.executable, "-m", "tandem_testing.chaos.gateway_main"]
        argv = [
            *(unconnected if self.shape.unconnected else tandem_command("gateway")),
            *("--host", self.host, "--port", str(port), *self._cells_of(name, cell)),
            *("--curve-keys", str(self._keys), "--model", str(self.checkpoint), "--served-model-name", self.model),
            *("--local-prefill-tokens", SHORT_REST),
        ]
        part = Part(name=name, argv=self._placed(argv), log=self.folder / f"{name}.log", before_exec=before_exec)
        part.start()
        gateway = Gateway(part=part, url=Address(self.host, port).url())
        self.gateways.append(gateway)
        return gateway

    def _cells_of(self, gateway: str, own: str) -> list[str]:
        """The flags of a gateway of cell `own`."""
        if self.neighbour_redis is None:
            return ["--redis-url", self._redis_url(gateway), "--cluster", own]
        urls = {CLUSTER: self._redis_url(gateway), NEIGHBOUR: self.neighbour_redis.url}
        others = [f"{name}={url}" for name, url in urls.items() if name != own]
        return ["--redis-url", urls[own], "--cluster", own, "--cells", *others]

    async def remove_worker(self, worker: Worker) -> None:
        """Kill a worker that `add_worker` has added and forget it."""
        self.workers.remove(worker)
        worker.thaw()
        worker.kill()
        worker.part.end()
        for line in (worker.request_line, worker.peer_line):
            if line is not None:
                await line.close()

    def remove_gateway(self, gateway: Gateway) -> None:
        self.gateways.remove(gateway)
        gateway.part.end()

    @property
    def redis_url(self) -> str:
        """Not through a proxy."""
        return Address(self.redis.host, self.redis.port).url("/0", scheme="redis")

    @property
    def keys(self) -> Keys:
        """Of this fleet in Redis."""
        return Keys(CLUSTER, Deployment.of(KeyPair.load(self._keys)).namespace)

    def _redis_url(self, user: str) -> str:
        if self.rented is not None:
            return _rented_url(self.rented).replace("://", f"://{USER}:{PASSWORD}@", 1)
        line = self.redis_lines.get(user)
        port = self.redis.port if line is None else line.port
        host = REDIS_NAME if self.shape.named else self.redis.host
        return Address(host, port).url("/0", scheme="redis")

    @property
    def names(self) -> NameService:
        """What names mean to the processes of a named fleet."""
        return NameService(self.folder)

    def of_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    @contextlib.contextmanager
    def no_restarts(self) -> Iterator[None]:
        """What dies stays dead until the end of the block."""
        self._restarting = False
        try:
            yield
        finally:
            self._restarting = True

    # What it says of itself

    async def metric(self, url: str, name: str) -> float:
        """Sum of a metric's series; 0 while the process does not answer."""
        return metric_sum(await self.metrics(url), name)

    async def metrics(self, url: str) -> str:
        """All metrics of a process at one moment; none while it does not answer."""
        try:
            return (await self.http.get(f"{url}/metrics")).text
        except httpx.TransportError:
            return ""

    async def gateway_metric(self, name: str) -> float:
        return sum([await self.metric(gateway.url, name) for gateway in self.gateways])

    async def worker_metric(self, name: str, role: str = "") -> float:
        chosen = self.of_role(role) if role else self.workers
        return sum([await self.metric(worker.url, f"tandem_worker_{name}") for worker in chosen])

    async def is_ready(self, url: str) -> bool:
        try:
            return (await self.http.get(f"{url}/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    async def audit(self, worker: Worker) -> dict[str, Any] | None:
        """What the engine of this worker counts; None while it cannot tell."""
        try:
            response = await self.http.get(f"{worker.url}/audit")
        except httpx.HTTPError:
            return None
        return dict(response.json()) if response.status_code == 200 else None

    async def all_ready(self, timeout_s: float) -> None:
        """Every process lives, is registered, and every gateway sees every worker."""

        async def ready() -> bool:
            parts = [part.alive for part in self.parts()]
            urls = [*(worker.url for worker in self.workers), *(gateway.url for gateway in self.gateways)]
            return all(parts) and all(await asyncio.gather(*map(self.is_ready, urls)))

        await until(ready, timeout_s, "every process ready", self.logs)

    def parts(self) -> list[Part]:
        return [*(worker.part for worker in self.workers), *(gateway.part for gateway in self.gateways)]

    def logs(self, lines: int = 12) -> str:
        """The end of every log."""
        tails = {part.name: part.log_text().splitlines()[-lines:] for part in self.parts()}
        return "\n".join(f"--- {name}\n" + "\n".join(tail) for name, tail in tails.items())

    async def close(self) -> None:
        """End everything. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for gateway in [*self.gateways]:
            self.remove_gateway(gateway)
        for worker in [*self.workers]:
            await self.remove_worker(worker)
        for line in self.redis_lines.values():
            await line.close()
        for redis in (self.redis, self.neighbour_redis):
            if redis is not None:
                redis.resume()
                redis.stop()
        await self.http.aclose()

    @property
    def clock_file(self) -> Path:
        """Seconds by which the wall clock of the worker services is wrong; absent: none."""
        return self.folder / "clock"

    @property
    def _keys(self) -> Path:
        return self.folder / "keys.json"

    def _placed(self, argv: Sequence[str]) -> Sequence[str]:
        return self.names.around(argv) if self.shape.named else argv

    async def _keep(self) -> None:
        dead: set[int] = set()
        while True:
            await asyncio.sleep(KEEPER_POLL_S)
            for part in self.parts():
                if part.alive or not part.kept:
                    continue
                if id(part) not in dead:
                    dead.add(id(part))
                    part.ended_at = time.monotonic()
                elif self._restarting and time.monotonic() - part.ended_at >= RESTART_AFTER_S:
                    dead.remove(id(part))
                    part.start()


@contextlib.asynccontextmanager
async def _rented(kind: Rented | None, folder: Path) -> "AsyncIterator[RedisPair | WatchedPair | RedisCluster | None]":
    """Its user has the least rights."""
    rules = documented_rules(CLUSTER)
    match kind:
        case Rented.PAIR:
            async with redis_pair(before_exec=die_with_parent) as pair:
                grant((pair.primary, pair.replica), rules, user=USER, password=PASSWORD)
                yield pair
        case Rented.SENTINELS:
            down = DOWN_AFTER_MS
            async with redis_sentinels(folder, down_after_ms=down, before_exec=die_with_parent) as watched:
                grant((watched.primary, watched.replica), rules, user=USER, password=PASSWORD)
                yield watched
        case Rented.CLUSTER:
            async with redis_cluster(folder, before_exec=die_with_parent) as cluster:
                grant(cluster.nodes, rules, user=USER, password=PASSWORD)
                yield cluster
        case None:
            yield None


def _rented_url(rented: RedisPair | WatchedPair | RedisCluster) -> str:
    """Of a cluster by two of its six nodes: the others are found."""
    if isinstance(rented, RedisCluster):
        return rented.url(rented.primaries[0], rented.replicas[1])
    return rented.url


def _owner(rented: RedisPair | WatchedPair | RedisCluster) -> RedisServer:
    return rented.owner(Keys(CLUSTER).starting) if isinstance(rented, RedisCluster) else rented.primary


def _redis(switch: Switch | None, host: str) -> RedisServer:
    """Where the workers of the fleet reach it."""
    if switch is None:
        return RedisServer.start(host=host, before_exec=die_with_parent)
    return RedisServer.start("--protected-mode", "no", host=switch.home, before_exec=die_with_parent)
