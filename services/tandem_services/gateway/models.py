"""The model that a gateway serves: its name, its tokenizer, and how long its context is."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller, no_such_model
from tandem_services.gateway.openai_schemas import ModelCard, ModelList
from tandem_services.gateway.output_dialect import OutputDialect
from tandem_services.router.choice import WorkerView


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """One model. `workers` lists the live workers, from memory."""

    name: str
    tokenizer: TextTokenizer
    dialect: OutputDialect
    workers: Callable[[], tuple[WorkerView, ...]]
    created: int = field(default_factory=lambda: int(time.time()))
    _last_length: int | None = None
    longest_token: int = field(init=False)
    """Bytes of the longest token: no token covers more characters than this."""

    def __post_init__(self) -> None:
        self.longest_token = max(map(len, self.tokenizer.vocabulary.token_bytes), default=1)

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and output that every live worker can take; None without workers."""
        lengths = [worker.context_length for worker in self.workers() if worker.model == self.name]
        return min(lengths, default=None)

    @property
    def last_context_length(self) -> int | None:
        """As `context_length`; while there are no workers, what it was with the last ones."""
        self._last_length = self.context_length or self._last_length
        return self._last_length

    def check_name(self, name: str | None, caller: Caller) -> None:
        """Raises `ApiError` 400 without a name and 404 for any model that is not there for `caller`."""
        if not name:
            raise bad_request("model is required", "model")
        if name != self.name:
            raise no_such_model(name)
        caller.check_model(name)

    def card(self) -> ModelCard:
        return ModelCard(id=self.name, created=self.created, root=self.name, max_model_len=self.context_length)

    def listing(self, caller: Caller) -> ModelList:
        return ModelList(data=[self.card()] if caller.may_use(self.name) else [])
