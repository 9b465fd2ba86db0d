"""The models file of a gateway with `--independent-models`: each entry is opened and closed by itself.

    file changed ─▶ read ─▶ entries with a fault are left out ─▶ `LiveModels.change_each` ─▶ names of what is not served
                                                                  again after a pause, as long as there are any ◀┘

So a model whose Redis, key file or tokenizer is missing keeps no other one out, and is served when these are there. The
former entry of a model is served until its successor can be. A file that cannot be read changes nothing.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.logs import quoted
from tandem_services.common.file_watcher import POLL_S, Signature, signature_of
from tandem_services.common.tasks import for_ever
from tandem_services.gateway.config import ModelsSource
from tandem_services.gateway.models.catalog import LiveModels
from tandem_services.gateway.models.file import ModelsFileMetrics, read_each_model

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 10.0
"""Between two attempts to open what could not be opened; a changed file is read at once."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class IndependentModels:
    """Makes `live` match the file of `source`, as far as that is possible."""

    source: ModelsSource
    live: LiveModels[Any]
    metrics: ModelsFileMetrics
    clock: Clock
    applied: bool = False
    """The file has been read once, and each of its entries tried."""
    _seen: Signature | None = None
    _fault: str = ""
    """Of the file as a whole."""
    _pause_s: float = FIRST_PAUSE_S
    _again_at: float = math.inf

    def missing(self) -> str | None:
        """What a gateway that starts waits for; nothing afterwards, whatever becomes of its models."""
        return None if self.applied else self._fault or "the models file has not been read yet"

    async def run(self) -> None:
        """Follow changes until canceled."""
        work = for_ever(
            self.poll, every_s=POLL_S, logger=logger, complaint="cannot check for changed models", at_once=True
        )
        await work

    async def poll(self) -> None:
        """Apply what has changed, and try again what could not be opened."""
        signature = await asyncio.to_thread(self._signature)
        changed = signature != self._seen
        if not changed and not self._fault and self.clock.now() < self._again_at:
            return
        try:
            models, faults = await asyncio.to_thread(read_each_model, self.source.path, self.source.defaults)
        except ConfigError as error:
            self._refuse(str(error))
            return
        errors = await self.live.change_each(models, faults)
        self._seen, self._fault, self.applied = signature, "", True
        self._report(errors, changed=changed)

    def _signature(self) -> Signature:
        try:
            return signature_of([self.source.path])
        except OSError:
            return ()

    def _report(self, errors: Mapping[str, str], *, changed: bool) -> None:
        before = self.live.catalog.unserved
        for name in errors:
            if errors[name] != before.get(name):
                logger.warning("model %s is not served as configured: %s", quoted(name), quoted(errors[name]))
        if changed or errors.keys() != before.keys():
            self.metrics.loaded(len(self.live.fleets))
        self.metrics.mended()
        self.metrics.unserved(len(errors))
        self._pause_s = FIRST_PAUSE_S if changed else min(MAX_PAUSE_S, self._pause_s * 2)
        self._again_at = self.clock.now() + self._pause_s if errors else math.inf
        self.live.catalog.unserved = errors

    def _refuse(self, fault: str) -> None:
        if fault != self._fault:
            self._fault = fault
            self.metrics.refused()
            logger.error("changed models are invalid, keeping the previous ones: %s", quoted(fault))
