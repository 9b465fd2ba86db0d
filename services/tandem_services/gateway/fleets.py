"""Fleets of a gateway, each with its router, sockets and tokenizer: opened at the start, or while it serves.

With `--independent-models` what belongs to no model, such as the usage of keys, is kept in a `HomeFleet`; otherwise in
the fleet of the first model.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.access.tenants import Board as UsageBoard
from tandem_services.gateway.app import Home
from tandem_services.gateway.config import GatewayConfig, ModelConfig
from tandem_services.gateway.console.fleet_document import ViewedFleet
from tandem_services.gateway.models.service import Fleet
from tandem_services.router.deployment import Deployment
from tandem_services.router.registered_adapters import RegisteredAdapters
from tandem_services.router.router import Router, RouterConfig

LATER_START_S = 5.0
"""A fleet that is opened while others are served waits for its Redis no longer than this; it is tried again."""


@dataclass(frozen=True, slots=True)
class RoutedFleet:
    """One of them."""

    router: Router
    parts: Fleet

    @staticmethod
    def of(
        config: ModelConfig, tokenizer: TextTokenizer, keys: KeyPair | None, *, start_timeout_s: float = 30.0
    ) -> "RoutedFleet":
        router = Router(
            RouterConfig(
                redis=config.redis,
                cluster=config.cluster,
                deployment=Deployment.of(keys),
                local_prefill_tokens=config.local_prefill_tokens,
                policies=config.policies,
                exploration=config.exploration,
                explained_per_second=config.explain_candidates,
                start_timeout_s=start_timeout_s,
            )
        )
        parts = Fleet(
            config=config,
            chooser=router,
            sessions=router.sessions,
            context=IpcContext(keys),
            tokenizer=tokenizer,
            quarantine=router.quarantine,
            end_reports=router.end_reports,
            fairness=router.fairness,
            adapters=RegisteredAdapters(model=config.name, deployment=Deployment.of(keys), board=router.adapters),
        )
        return RoutedFleet(router, parts)

    @property
    def view(self) -> ViewedFleet:
        """For people."""
        return ViewedFleet(self.parts.config.cluster, self.router.fleet, self.parts.config.root)

    async def start(self) -> None:
        """Raises `RedisUnavailableError`."""
        await self.router.start()
        if self.parts.adapters is not None:
            # No registered name is unknown at first.
            await self.parts.adapters.sync()

    async def close(self) -> None:
        await self.router.stop()
        self.parts.context.close()


@dataclass(frozen=True, slots=True)
class HomeFleet:
    """A fleet without workers: the home of a gateway whose models are independent of each other."""

    place: Home
    router: Router | None
    """None where keys have no usage to count."""

    @staticmethod
    def of(config: ModelConfig, *, counts_usage: bool) -> "HomeFleet":
        """Raises `ConfigError`."""
        keys = key_pair_of(config)
        settings = RouterConfig(redis=config.redis, cluster=config.cluster, deployment=Deployment.of(keys))
        return HomeFleet(Home(keys, config.cluster), Router(settings) if counts_usage else None)

    @property
    def usage(self) -> UsageBoard | None:
        """What all gateways of this home share."""
        return None if self.router is None else self.router.usage

    async def start(self) -> None:
        """Raises `RedisUnavailableError`."""
        if self.router is not None:
            await self.router.start()

    async def close(self) -> None:
        if self.router is not None:
            await self.router.stop()


@dataclass(slots=True)
class OpenFleets:
    """All open fleets. The creator of a fleet closes it at the end, with `close_all`, or before."""

    _open: list[RoutedFleet | HomeFleet] = field(default_factory=list)

    def add(
        self,
        models: Sequence[ModelConfig],
        tokenizers: Mapping[Path, TextTokenizer],
        keys: Mapping[str, KeyPair | None],
    ) -> list[RoutedFleet]:
        """Those of `models`, not started yet."""
        fleets = [RoutedFleet.of(model, tokenizers[model.path], keys[model.name]) for model in models]
        self._open += fleets
        return fleets

    def add_home(self, config: GatewayConfig) -> HomeFleet | None:
        """Not started yet; None where the first model's fleet is the home. Raises `ConfigError`."""
        if not config.independent_models or config.models_file is None:
            return None
        home = HomeFleet.of(config.models_file.defaults, counts_usage=config.api_keys is not None)
        self._open.append(home)
        return home

    async def open(self, model: ModelConfig) -> RoutedFleet:
        """One more, started. Raises `ConfigError`, `CheckpointError` and `RedisUnavailableError`."""
        tokenizer = await asyncio.to_thread(TextTokenizer.load, model.path)
        fleet = RoutedFleet.of(model, tokenizer, key_pair_of(model), start_timeout_s=LATER_START_S)
        async with AsyncExitStack() as opened:
            opened.push_async_callback(fleet.close)
            await fleet.start()
            opened.pop_all()
        self._open.append(fleet)
        return fleet

    async def close(self, fleet: RoutedFleet) -> None:
        self._open.remove(fleet)
        await fleet.close()

    async def close_all(self) -> None:
        while self._open:
            await self._open.pop().close()


def key_pair_of(model: ModelConfig) -> KeyPair | None:
    """Raises `ConfigError`."""
    return None if model.curve_keys is None else KeyPair.load(model.curve_keys)


def load_tokenizers(models: Sequence[ModelConfig]) -> dict[Path, TextTokenizer]:
    """By folder: models of one folder share one. Raises `CheckpointError`."""
    return {path: TextTokenizer.load(path) for path in dict.fromkeys(model.path for model in models)}
