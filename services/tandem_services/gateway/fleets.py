"""Fleets of a gateway, each with its router, sockets and tokenizer: opened at the start, or while it serves.

With `--independent-models` what belongs to no model, such as the usage of keys, is kept in a `HomeFleet`; otherwise in
the fleet of the first model.
"""

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import run_periodically
from tandem_services.gateway.access.tenants import Board as UsageBoard
from tandem_services.gateway.app import Home
from tandem_services.gateway.config import GatewayConfig, ModelConfig
from tandem_services.gateway.console.fleet_document import ViewedFleet
from tandem_services.gateway.models.fleet_tokenizer import FleetTokenizer, FoundTokenizer, preferred
from tandem_services.gateway.models.service import Fleet
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoads
from tandem_services.router.cells.cell_router import CellRouter
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import Keys
from tandem_services.router.registered_adapters import RegisteredAdapters
from tandem_services.router.router import Router, RouterConfig
from tandem_services.router.shared_state import TokenizerCopy

logger = logging.getLogger(__name__)

COPY_EVERY_S = 300.0
"""How often a gateway looks whether Redis still has a tokenizer."""

LATER_START_S = 5.0
"""A fleet that is opened while others are served waits for its Redis no longer than this; it is tried again."""


@dataclass(frozen=True, slots=True)
class RoutedFleet:
    """One of them."""

    router: Router | CellRouter
    parts: Fleet
    tokenizer: str = ""
    """Digest of the tokenizer, if workers have sent it."""

    @staticmethod
    def of(
        config: ModelConfig, tokenizer: TextTokenizer, keys: KeyPair | None, *, start_timeout_s: float = 30.0
    ) -> "RoutedFleet":
        """With the tokenizer of `config.path`. Not started yet."""
        assert config.path is not None, "a model of a fleet is opened by `of_fleet`"
        router = _router(config, keys, start_timeout_s)
        return RoutedFleet(router, _parts(config, config.path, tokenizer, IpcContext(keys), router, keys))

    @staticmethod
    async def of_fleet(
        config: ModelConfig, keys: KeyPair | None, loads: TokenizerLoads, *, start_timeout_s: float
    ) -> "RoutedFleet":
        """With the tokenizer of its workers, which is requested now. `start` is the caller's, too.

        Raises `ConfigError`, `CheckpointError` and `RedisUnavailableError`.
        """
        router, context = _router(config, keys, start_timeout_s), IpcContext(keys)
        async with AsyncExitStack() as opened:
            opened.callback(context.close)
            opened.push_async_callback(router.stop)
            await router.start()
            deployment = Deployment.of(keys)
            source = FleetTokenizer(
                model=config.name,
                context=context,
                copy=TokenizerCopy(
                    redis=config.redis,
                    keys=Keys(config.cluster, deployment.namespace),
                    deployment=deployment,
                    model=config.name,
                ),
                loads=loads,
            )
            found = await source.find(router.offered(), router.workers())
            tokenizer = await loads.load(config.name, found.digest, found.folder)
            router.require_encoding(found.encoding)
            parts = _parts(config, found.folder, tokenizer, context, router, keys, _upkeep(source, found))
            opened.pop_all()
        return RoutedFleet(router, parts, found.digest)

    @property
    def outdated(self) -> bool:
        """Whether most of the workers that may be used have another tokenizer."""
        if not self.tokenizer:
            return False
        return preferred(self.router.ready(), self.parts.config.name, current=self.tokenizer) != self.tokenizer

    @property
    def view(self) -> ViewedFleet:
        """For people."""
        return ViewedFleet(self.parts.config.cluster, self.router.fleet, self.parts.config.root)

    async def start(self) -> None:
        """Raises `RedisUnavailableError`."""
        await self.router.start()
        await self.sync()

    async def sync(self) -> None:
        """With the router started: read what gateways share."""
        if self.parts.adapters is not None:
            # No registered name is unknown at first.
            await self.parts.adapters.sync()

    async def close(self) -> None:
        await self.router.stop()
        self.parts.context.close()


def _router(config: ModelConfig, keys: KeyPair | None, start_timeout_s: float) -> Router | CellRouter:
    settings = RouterConfig(
        redis=config.redis,
        cluster=config.cluster,
        deployment=Deployment.of(keys),
        local_prefill_tokens=config.local_prefill_tokens,
        policies=config.policies,
        exploration=config.exploration,
        explained_per_second=config.explain_candidates,
        start_timeout_s=start_timeout_s,
    )
    if not config.cells:
        return Router(settings)
    return CellRouter(
        settings,
        config.cells,
        model=config.name,
        worker_wait_s=config.worker_wait_s,
        needs_prefill=not config.prefill_fallback,
    )


def _parts(
    config: ModelConfig,
    folder: Path,
    tokenizer: TextTokenizer,
    context: IpcContext,
    router: Router | CellRouter,
    keys: KeyPair | None,
    upkeep: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Fleet:
    return Fleet(
        config=config,
        folder=folder,
        chooser=router,
        sessions=router.sessions,
        context=context,
        tokenizer=tokenizer,
        quarantine=router.quarantine,
        end_reports=router.end_reports,
        fairness=router.fairness,
        adapters=RegisteredAdapters(model=config.name, deployment=Deployment.of(keys), board=router.adapters),
        upkeep=upkeep,
        cells=router.figures if isinstance(router, CellRouter) else None,
    )


def _upkeep(source: FleetTokenizer, found: FoundTokenizer) -> Callable[[], Coroutine[Any, Any, None]]:
    """What keeps the copy in Redis, for as long as it runs."""

    async def run() -> None:
        failure = "cannot keep a copy of the tokenizer in Redis"
        work = partial(source.keep_copy, found.digest)
        await run_periodically(work, every_s=COPY_EVERY_S, logger=logger, failure=failure, at_once=True)

    return run


@dataclass(frozen=True, slots=True)
class HomeFleet:
    """A fleet without workers: the home of a gateway whose models are independent of each other."""

    place: Home
    router: Router | None
    """None where keys have no usage to count."""
    has_cells: bool = False
    """The gateway serves without its Redis, which limits then do without."""

    @staticmethod
    def of(config: ModelConfig, *, counts_usage: bool) -> "HomeFleet":
        """Raises `ConfigError`."""
        keys = key_pair_of(config)
        settings = RouterConfig(redis=config.redis, cluster=config.cluster, deployment=Deployment.of(keys))
        if config.cells:
            settings = replace(settings, start_timeout_s=LATER_START_S)
        router = Router(settings) if counts_usage else None
        return HomeFleet(Home(keys, config.cluster), router, has_cells=bool(config.cells))

    @property
    def usage(self) -> UsageBoard | None:
        """What all gateways of this home share."""
        return None if self.router is None else self.router.usage

    async def start(self) -> None:
        """Raises `RedisUnavailableError`."""
        if self.router is None:
            return
        try:
            await self.router.start()
        except RedisUnavailableError as error:
            if not self.has_cells:
                raise
            logger.warning("limits of keys are of this gateway alone until its Redis answers: %s", error)
            self.router.begin()

    async def close(self) -> None:
        if self.router is not None:
            await self.router.stop()


@dataclass(slots=True)
class OpenFleets:
    """All open fleets. The creator of a fleet closes it at the end, with `close_all`, or before."""

    loads: TokenizerLoads = field(default_factory=lambda: TokenizerLoads(clock=MonotonicClock()))
    _open: list[RoutedFleet | HomeFleet] = field(default_factory=list)

    def add(
        self,
        models: Sequence[ModelConfig],
        tokenizers: Mapping[Path, TextTokenizer],
        keys: Mapping[str, KeyPair | None],
    ) -> list[RoutedFleet]:
        """Those of `models`, not started yet."""
        fleets = [RoutedFleet.of(model, tokenizers[_folder(model)], keys[model.name]) for model in models]
        self._open += fleets
        return fleets

    def add_home(self, config: GatewayConfig) -> HomeFleet | None:
        """Not started yet; None where the first model's fleet is the home. Raises `ConfigError`."""
        if config.home is None:
            return None
        home = HomeFleet.of(config.home, counts_usage=config.api_keys is not None)
        self._open.append(home)
        return home

    async def open(self, model: ModelConfig) -> RoutedFleet:
        """One more, started. Raises `ConfigError`, `CheckpointError` and `RedisUnavailableError`."""
        fleet = await _opened(model, self.loads)
        self._open.append(fleet)
        return fleet

    async def close(self, fleet: RoutedFleet) -> None:
        self._open.remove(fleet)
        await fleet.close()

    async def close_all(self) -> None:
        while self._open:
            await self._open.pop().close()


async def _opened(model: ModelConfig, loads: TokenizerLoads) -> RoutedFleet:
    """Raises as `OpenFleets.open`."""
    keys = key_pair_of(model)
    if model.path is None:
        fleet = await RoutedFleet.of_fleet(model, keys, loads, start_timeout_s=LATER_START_S)
        started = fleet.sync()
    else:
        tokenizer = await loads.load_folder(model.name, model.path)
        fleet = RoutedFleet.of(model, tokenizer, keys, start_timeout_s=LATER_START_S)
        started = fleet.start()
    async with AsyncExitStack() as opened:
        opened.push_async_callback(fleet.close)
        await started
        opened.pop_all()
    return fleet


def key_pair_of(model: ModelConfig) -> KeyPair | None:
    """Raises `ConfigError`."""
    return None if model.curve_keys is None else KeyPair.load(model.curve_keys)


def load_tokenizers(models: Sequence[ModelConfig]) -> dict[Path, TextTokenizer]:
    """By folder: models of one folder share one. Raises `CheckpointError`."""
    return {path: TextTokenizer.load(path) for path in dict.fromkeys(map(_folder, models))}


def _folder(model: ModelConfig) -> Path:
    assert model.path is not None, "a model of a fleet is opened later"
    return model.path
