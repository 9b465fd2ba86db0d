"""Fleets as they are in Redis: a router and sockets for each, from opening to closing."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.console.fleet_document import ViewedFleet
from tandem_services.gateway.model_service import Fleet
from tandem_services.router.config import RouterConfig
from tandem_services.router.deployment import Deployment
from tandem_services.router.router import Router

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
                told_per_second=config.explain_candidates,
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
            fairness=router.fairness,
        )
        return RoutedFleet(router, parts)

    @property
    def view(self) -> ViewedFleet:
        """For people."""
        return ViewedFleet(self.parts.config.cluster, self.router.fleet)

    async def close(self) -> None:
        await self.router.stop()
        self.parts.context.close()


@dataclass(slots=True)
class OpenFleets:
    """All that are open. Who makes one closes it at the end, with `close_all`, or before."""

    _open: list[RoutedFleet] = field(default_factory=list)

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

    async def open(self, model: ModelConfig) -> RoutedFleet:
        """One more, started. Raises `ConfigError`, `CheckpointError` and `RedisUnavailableError`."""
        tokenizer = await asyncio.to_thread(TextTokenizer.load, model.path)
        fleet = RoutedFleet.of(model, tokenizer, key_pair_of(model), start_timeout_s=LATER_START_S)
        try:
            await fleet.router.start()
        except RedisUnavailableError:
            await fleet.close()
            raise
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
