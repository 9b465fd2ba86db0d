"""Models that are opened and closed while the gateway serves, each by itself: those of the models file with
`--independent-models`, and the one whose tokenizer workers send (`--model fleet`).

    file changed ─▶ read ─▶ entries with a fault are left out ─▶ `LiveModels.change_each` ─▶ names of what is not served
                                                                  again after a pause, as long as there are any ◀┘

So a model whose Redis, key file or tokenizer is missing keeps no other one out, and is served when these are there. The
former entry of a model is served until its successor can be. A file that cannot be read changes nothing. A model whose
workers have another tokenizer than before is opened again.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_services.common.file_watcher import POLL_S, Signature, signature_of
from tandem_services.common.metrics import MetricFamilies
from tandem_services.common.tasks import run_periodically
from tandem_services.gateway.config import ModelConfig, ModelsSource
from tandem_services.gateway.models.awaited import AwaitedModel
from tandem_services.gateway.models.catalog import LiveModels
from tandem_services.gateway.models.file import Models, ModelsFileMetrics, read_each_model

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 10.0
"""Between two attempts to open what could not be opened; a changed file is read at once."""

logger = logging.getLogger(__name__)


class Entries(Protocol):
    """Which models are wanted."""

    def signature(self) -> Signature:
        """Another one after a change."""
        ...

    def read(self) -> tuple[Models, dict[str, str]]:
        """As `read_each_model`, which see. Raises `ConfigError`."""
        ...


@dataclass(frozen=True, slots=True)
class FileEntries:
    """Those of a models file."""

    source: ModelsSource

    def signature(self) -> Signature:
        try:
            return signature_of([self.source.path])
        except OSError:
            return ()

    def read(self) -> tuple[Models, dict[str, str]]:
        return read_each_model(self.source.path, self.source.defaults)


@dataclass(frozen=True, slots=True)
class OneEntry:
    """The model of the flags. A gateway that does not serve it is not ready."""

    model: ModelConfig

    def signature(self) -> Signature:
        return ()

    def read(self) -> tuple[Models, dict[str, str]]:
        return (self.model,), {}


@dataclass(kw_only=True, slots=True)
class IndependentModels:
    """Makes `live` match `entries`, as far as that is possible."""

    entries: Entries
    live: LiveModels[Any]
    metrics: ModelsFileMetrics
    clock: Clock
    families: MetricFamilies
    """Of models that are not served yet."""
    applied: bool = False
    """The file has been read once, and each of its entries tried."""
    _seen: Signature | None = None
    _fault: str = ""
    """Of the file as a whole."""
    _pause_s: float = FIRST_PAUSE_S
    _again_at: float = math.inf

    def missing(self) -> str | None:
        """What a gateway that starts waits for; with a models file nothing later, whatever becomes of its models."""
        if not self.applied:
            return self._fault or "the models have not been opened yet"
        if not isinstance(self.entries, OneEntry) or self.live.fleets or self.entries.model.from_zero:
            return None
        return next(iter(self.live.catalog.unserved.values()), None)

    async def run(self) -> None:
        """Follow changes until canceled."""
        work = run_periodically(
            self.poll, every_s=POLL_S, logger=logger, failure="cannot check for changed models", at_once=True
        )
        await work

    async def poll(self) -> None:
        """Apply what has changed, and try again what could not be opened."""
        for awaited in self.live.catalog.awaited.values():
            awaited.report()
        signature = await asyncio.to_thread(self.entries.signature)
        changed = signature != self._seen
        # What could not be opened again waits for its pause, too.
        outdated = self._again_at == math.inf and self.live.outdated
        if not changed and not self._fault and self.clock.now() < self._again_at and not outdated:
            return
        try:
            models, faults = await asyncio.to_thread(self.entries.read)
        except ConfigError as error:
            self._refuse(str(error))
            return
        self._await(models)
        errors = await self.live.change_each(models, faults)
        self._seen, self._fault, self.applied = signature, "", True
        self._await(models)
        self._report(errors, changed=changed)

    def _await(self, models: Models) -> None:
        """Requests for models whose tokenizer is awaited get another answer than those for unknown ones."""
        served = {fleet.parts.config.name for fleet in self.live.fleets}
        wanted = {model.name: model.names for model in models if model.path is None and model.name not in served}
        before = self.live.catalog.awaited
        self.live.catalog.awaited = {
            name: before[name]
            if name in before and before[name].names == names
            else AwaitedModel(names=names, clock=self.clock, families=self.families)
            for name, names in wanted.items()
        }
        for name, one in before.items():
            if self.live.catalog.awaited.get(name) is not one:
                one.close()

    def _report(self, errors: Mapping[str, str], *, changed: bool) -> None:
        before = self.live.catalog.unserved
        for name in errors:
            if errors[name] != before.get(name):
                logger.warning("model %s is not served as configured: %s", quoted(name), quoted(errors[name]))
        if changed or errors.keys() != before.keys():
            self.metrics.loaded(len(self.live.fleets))
        self.metrics.mended()
        self.metrics.unserved(len(errors))
        for name, one in self.live.catalog.awaited.items():
            one.is_unloadable = name in self.live.unloadable
        # A worker that starts may have the tokenizer at any moment, or another one: files that could not be loaded are
        # not parsed at each attempt (`tokenizer_loads`).
        soon = changed or not self.live.absent.isdisjoint(self.live.catalog.awaited)
        self._pause_s = FIRST_PAUSE_S if soon else min(MAX_PAUSE_S, self._pause_s * 2)
        self._again_at = self.clock.now() + self._pause_s if errors else math.inf
        self.live.catalog.unserved = errors

    def _refuse(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            self.metrics.refused()
            logger.error("changed models are invalid, keeping the previous ones: %s", quoted(fault))
