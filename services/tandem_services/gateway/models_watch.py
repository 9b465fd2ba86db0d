"""The models file, followed while it changes (docs/multi-model.md)."""

import logging
from dataclasses import dataclass
from typing import Any

from tandem_engine.errors import CheckpointError, ConfigError
from tandem_engine.logs import quoted
from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.config import ModelConfig, ModelsSource
from tandem_services.gateway.follower import Follower, Signature, signature_of
from tandem_services.gateway.live_models import LiveModels
from tandem_services.gateway.models_file import read_models

logger = logging.getLogger(__name__)

Models = tuple[ModelConfig, ...]


class ModelsFileMetrics:
    """What can be seen of the file from outside."""

    def __init__(self, families: MetricFamilies, *, served: int) -> None:
        self._served = families.gauge("tandem_gateway_models", "Model services that are served")
        self._stale = families.gauge(
            "tandem_gateway_models_file_stale", "1 while the models file is invalid and the previous models are served"
        )
        self._reloads = families.counter(
            "tandem_gateway_models_file_reloads", "Changes of the models file, by outcome", ["outcome"]
        )
        self._served.set(served)

    def loaded(self, served: int) -> None:
        self._served.set(served)
        self._stale.set(0)
        self._reloads.labels(outcome="loaded").inc()

    def refused(self) -> None:
        self._stale.set(1)
        self._reloads.labels(outcome="refused").inc()

    def mended(self) -> None:
        self._stale.set(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelsWatch:
    """Makes `live` serve what `source` says."""

    source: ModelsSource
    live: LiveModels[Any]
    metrics: ModelsFileMetrics

    def follower(self, served: Models) -> Follower[Models]:
        """`served`: what the file said at the start."""
        return Follower(
            value=served,
            signature=self._signature,
            read=lambda: read_models(self.source.path, self.source.defaults),
            take=self._take,
            refused=self._refused,
            mended=self.metrics.mended,
            faults=(ConfigError, CheckpointError, RedisUnavailableError),
        )

    async def run(self, served: Models) -> None:
        """Follow changes, for ever."""
        await self.follower(served).run(logger, what="models")

    def _signature(self) -> Signature:
        try:
            return signature_of([self.source.path])
        except OSError:
            return ()

    async def _take(self, models: Models) -> None:
        await self.live.change(models)
        self.metrics.loaded(len(models))

    def _refused(self, complaint: str) -> None:
        self.metrics.refused()
        logger.error("changed models are invalid, keeping the previous ones: %s", quoted(complaint))
