"""A Tandem whose processes are of several releases: `tandem worker` and `tandem gateway`, as a pod runs them."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tandem_engine.base.addresses import LOOPBACK, Address
from tandem_engine.base.linux import die_with_parent
from tandem_engine.ipc.keys import KeyPair
from tandem_services.cli.flags import bundled_model
from tandem_services.common.sockets import free_port
from tandem_services.common.tokens import order_token
from tandem_testing.chaos.fleet import ENGINE_FLAGS, SHORT_REST
from tandem_testing.chaos.parts import Part
from tandem_testing.metric_text import metric_sum
from tandem_testing.redis_server import RedisServer
from tandem_testing.skew.releases import Release
from tandem_testing.waiting import until

CLUSTER = "skew"
MODEL = "tandem-mini"
START_TIMEOUT_S = 600.0
"""A hang, not a promise: the first start of an older release compiles what the next ones find in its cache."""
DRAIN_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A worker or a gateway."""

    part: Part
    url: str
    role: str

    async def end(self) -> None:
        """SIGTERM, as a kubelet sends it, and its exit."""
        self.part.send(signal.SIGTERM)
        await until(lambda: not self.part.alive, 2 * DRAIN_S, f"{self.part.name} has exited", self.part.log_text)

    async def kill(self) -> None:
        """SIGKILL for it and its engine."""
        for pid in (self.part.pid, *_children(self.part.pid)):
            with contextlib.suppress(ProcessLookupError):  # an engine may have ended with its parent
                os.kill(pid, signal.SIGKILL)
        await until(lambda: not self.part.alive, DRAIN_S, f"{self.part.name} is gone")


def _children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split())]
    except FileNotFoundError:  # it has ended
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Totals of a fleet at one moment."""

    transfers: dict[str, float]
    """KV that each worker has received from another one, by its URL."""
    moved: float
    """Attempts that another worker continued with their KV."""
    lost: float
    """Attempts that another worker computed again."""
    alone: float
    """Placements on a decode worker because no prefill worker could compute the prompt."""


@dataclass(kw_only=True, slots=True)
class MixedFleet:
    """Belongs to one event loop. Use `MixedFleet.running`."""

    folder: Path
    redis: RedisServer
    members: list[Member] = field(default_factory=list)
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=httpx.Timeout(10.0)))
    _started: int = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path) -> "AsyncIterator[MixedFleet]":
        """Without a member yet; all that was added is killed at the end. Logs are in `folder`, which exists."""
        fleet = cls(folder=folder, redis=RedisServer.start(before_exec=die_with_parent))
        keys = KeyPair.generate()
        keys.save(fleet._keys)
        fleet.http.headers["Authorization"] = f"Bearer {order_token(keys)}"
        try:
            yield fleet
        finally:
            for member in fleet.members:
                await member.kill()
            fleet.redis.stop()
            await fleet.http.aclose()

    def add_worker(self, release: Release, role: str, *, model: str = MODEL, cluster: str = CLUSTER) -> Member:
        port, name = free_port(), self._name(role, release)
        argv = release.command(
            *("worker", "--role", role, "--worker-id", name, "--model", str(bundled_model())),
            *("--served-model-name", model, "--host", LOOPBACK, "--health-host", LOOPBACK, "--health-port", str(port)),
            *("--drain-timeout", str(DRAIN_S), "--cluster", cluster, *self._common, *ENGINE_FLAGS),
        )
        return self._start(name, argv, port, role)

    def add_gateway(self, release: Release) -> Member:
        port, name = free_port(), self._name("gateway", release)
        argv = release.command(
            *("gateway", "--host", LOOPBACK, "--port", str(port), "--model", str(bundled_model())),
            *("--served-model-name", MODEL, "--local-prefill-tokens", SHORT_REST, "--cluster", CLUSTER, *self._common),
        )
        return self._start(name, argv, port, "gateway")

    def add_shared_gateway(self, release: Release, models: Sequence[str], *flags: str) -> Member:
        """In front of a service for each of `models`, whose cluster has its name, as a ModelGateway's."""
        port, name = free_port(), self._name("gateway", release)
        file = self.folder / f"{name}.json"
        entries = [{"model": str(bundled_model()), "served_model_name": one, "cluster": one} for one in models]
        file.write_text(json.dumps({"models": entries}), encoding="utf-8")
        argv = release.command(
            *("gateway", "--host", LOOPBACK, "--port", str(port), "--models", str(file), *flags),
            *("--local-prefill-tokens", SHORT_REST, *self._common),
        )
        return self._start(name, argv, port, "gateway")

    async def retire(self, member: Member) -> None:
        """Drain it and forget it."""
        await member.end()
        self.members.remove(member)

    async def lose(self, member: Member) -> None:
        """Kill it and forget it."""
        await member.kill()
        self.members.remove(member)

    def of(self, role: str) -> list[Member]:
        """The oldest first."""
        return [member for member in self.members if member.role == role]

    async def ready(self) -> None:
        """Wait for every member. Raises `AssertionError` with the logs of one that has ended."""

        async def all_ready() -> bool:
            for member in self.members:
                assert member.part.alive, f"{member.part.name} has ended\n{member.part.log_text()[-4000:]}"
            return all(await asyncio.gather(*(self._is_ready(member.url) for member in self.members)))

        await until(all_ready, START_TIMEOUT_S, "every member ready", self.logs)

    async def counts(self) -> Counts:
        gateways = [(await self.http.get(f"{member.url}/metrics")).text for member in self.of("gateway")]
        workers = [member for member in self.members if member.role != "gateway"]
        ended = "tandem_gateway_attempts_total"
        moved = sum(metric_sum(text, f'{ended}{{outcome="moved"}}') for text in gateways)
        finished = sum(metric_sum(text, f'{ended}{{outcome="finished"}}') for text in gateways)
        placements = 'tandem_gateway_placements_total{placement="degraded"}'
        return Counts(
            transfers={
                each.url: metric_sum(
                    (await self.http.get(f"{each.url}/metrics")).text, "tandem_worker_kv_transfers_total"
                )
                for each in workers
            },
            moved=moved,
            lost=sum(metric_sum(text, ended) for text in gateways) - finished - moved,
            alone=sum(metric_sum(text, placements) for text in gateways),
        )

    def logs(self, lines: int = 15) -> str:
        """The end of every log."""
        tails = {member.part.name: member.part.log_text().splitlines()[-lines:] for member in self.members}
        return "\n".join(f"--- {name}\n" + "\n".join(tail) for name, tail in tails.items())

    async def _is_ready(self, url: str) -> bool:
        try:
            return (await self.http.get(f"{url}/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    def _start(self, name: str, argv: list[str], port: int, role: str) -> Member:
        part = Part(name=name, argv=argv, log=self.folder / f"{name}.log")
        part.start()
        member = Member(part=part, url=Address(LOOPBACK, port).url(), role=role)
        self.members.append(member)
        return member

    def _name(self, role: str, release: Release) -> str:
        self._started += 1
        return f"{role}-{self._started}-{release.name}"

    @property
    def _common(self) -> tuple[str, ...]:
        return ("--redis-url", self.redis.url, "--curve-keys", str(self._keys))

    @property
    def _keys(self) -> Path:
        return self.folder / "keys.json"
