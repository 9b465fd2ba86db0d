"""Tokenizers of models whose files a stand-alone router does not have (`--model NAME=fleet`): their workers send them.

As a gateway gets them (`gateway.models.fleet_tokenizer`): by the digest in the signed rows of the workers, from one of
these, or from the copy in Redis. A tokenizer is read again when most of the workers that are ready report other files.
Until there is one, requests for text are answered with 503, and an Inference Gateway's are picked by load alone.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.common.tasks import run_periodically
from tandem_services.gateway.models.fleet_tokenizer import FoundTokenizer, preferred
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoads
from tandem_services.router.decision import WorkerView
from tandem_services.router_server.config import TokenizedModel

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class FleetView(Protocol):
    """What is needed of the router."""

    def workers(self) -> tuple[WorkerView, ...]: ...

    def offered(self) -> tuple[WorkerView, ...]: ...

    def ready(self) -> tuple[WorkerView, ...]: ...


class Source(Protocol):
    """Of one model."""

    async def find(self, offered: tuple[WorkerView, ...], others: tuple[WorkerView, ...]) -> FoundTokenizer: ...


@dataclass(kw_only=True, slots=True)
class WorkerTokenizers:
    """Of all such models. Belongs to one event loop."""

    models: Iterable[TokenizedModel]
    fleet: FleetView
    source: Callable[[TokenizedModel], Source]
    accept: Callable[[TokenizedModel, TextTokenizer], None]
    """Reads for the model with this tokenizer from now on."""
    loads: TokenizerLoads
    _digests: dict[str, str] = field(default_factory=dict)
    """Of the tokenizers that are used, by the models' own names."""
    _warnings: dict[str, str] = field(default_factory=dict)
    """The last one of each model: it is logged once."""

    async def run(self) -> None:
        """Models do not wait for each other: workers of one that do not answer take up to a minute."""
        await asyncio.gather(*(self._watch(model) for model in self.models))

    async def _watch(self, model: TokenizedModel) -> None:
        async def look() -> None:
            await self.look_for(model)

        failure = f"cannot look for the tokenizer of workers of model {quoted(model.names[0])}"
        await run_periodically(look, every_s=LOOK_EVERY_S, logger=logger, failure=failure, at_once=True)

    async def look_for(self, model: TokenizedModel) -> None:
        """Get its tokenizer, if it is missing or has changed."""
        name = model.names[0]
        current = self._digests.get(name, "")
        if current and preferred(self.fleet.ready(), name, current=current) == current:
            return
        try:
            found = await self.source(model).find(self.fleet.offered(), self.fleet.workers())
            if found.digest == current:
                # Most of the workers that requests may be sent to have it still.
                return
            tokenizer = await self.loads.load(name, found.digest, found.folder)
        except (ConfigError, CheckpointError, RedisUnavailableError) as error:
            self._warn(name, str(error))
            return
        self.accept(model, tokenizer)
        self._digests[name] = found.digest
        self._warnings.pop(name, None)
        logger.info("reads requests of model %s with the tokenizer of its workers", quoted(name))

    def _warn(self, name: str, reason: str) -> None:
        if self._warnings.get(name) != reason:
            self._warnings[name] = reason
            logger.warning("no tokenizer of model %s: %s", quoted(name), reason)
