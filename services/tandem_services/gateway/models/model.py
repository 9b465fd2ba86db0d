"""The model of one model service: its names, its tokenizer and its context length."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem_engine.base.errors import CheckpointError
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.models.adapters import AdapterNames
from tandem_services.gateway.output.reader import OutputDialect
from tandem_services.router.decision import WorkerView
from tandem_services.router.registered_adapters import RegisteredAdapters


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    root: str
    max_model_len: int | None
    owned_by: str = "tandem"
    parent: str | None = None
    """Of an adapter, the model that it is of."""


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


@dataclass(kw_only=True, slots=True)
class ServedModel:
    """One model. `workers` lists the live workers, from memory; while they are the same, by the same object, or
    every request looks at the whole fleet."""

    names: tuple[str, ...]
    """What clients may call it; the first is its own name, the others are aliases."""
    tokenizer: TextTokenizer
    dialect: OutputDialect
    workers: Callable[[], tuple[WorkerView, ...]]
    offered: Callable[[], tuple[WorkerView, ...]] = tuple
    """Those of them that new requests may be sent to. Names of adapters are resolved by them."""
    registered: RegisteredAdapters | None = None
    """Adapters that commands to gateways have registered."""
    checkpoint_length: int | None = None
    """The checkpoint's context length, for a fleet that may be scaled to zero: the limit for clients until a worker has
    reported its own. None: without a worker no request is served."""
    root: str = ""
    """Repository and commit that it is from; empty where no hub is."""
    created: int = field(default_factory=lambda: int(time.time()))
    _last_length: int | None = None
    _least_length: int | None = None
    _lengths_of: tuple[WorkerView, ...] | None = None
    """The workers of which the shortest context length is `_least_length`."""
    _adapters_of: tuple[tuple[WorkerView, ...] | None, tuple[WorkerView, ...] | None] = (None, None)
    """The workers, and those that take requests, of `_last_offered`."""
    _last_offered: tuple[tuple[WorkerView, ...], frozenset[str]] = ((), frozenset())
    longest_token: int = field(init=False)
    """Bytes of the longest token: no token covers more characters than this."""

    def __post_init__(self) -> None:
        self.longest_token = max(map(len, self.tokenizer.vocabulary.token_bytes), default=1)

    @property
    def name(self) -> str:
        """Its own, under which its workers know it."""
        return self.names[0]

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and output that every live worker can take; None without workers."""
        workers = self.workers()
        if workers is not self._lengths_of:
            own = (worker.context_length for worker in workers if worker.model == self.name)
            self._lengths_of, self._least_length = workers, min(own, default=None)
        return self._least_length

    @property
    def last_context_length(self) -> int | None:
        """As `context_length`; while there are no workers, what it was with the last ones, or will be at most."""
        self._last_length = self.context_length or self._last_length
        return self._last_length or self.checkpoint_length

    @property
    def from_zero(self) -> bool:
        """Whether requests are taken while there is no worker."""
        return self.checkpoint_length is not None

    def names_for(self, caller: Caller) -> tuple[str, ...]:
        """Those of its names that `caller` may use."""
        return tuple(name for name in self.names if caller.may_use(name, model=self.name))

    @property
    def adapters(self) -> AdapterNames:
        """What is registered, and what its workers have loaded, now. While there are no workers, what the last ones
        had, also those of other gateways: requests wait for a worker as those of the model do."""
        view = workers, takers = self.workers(), self.offered()
        if not all(now is before for now, before in zip(view, self._adapters_of, strict=True)):
            self._adapters_of = view
            own = tuple(worker for worker in workers if worker.model == self.name)
            if own:
                self._last_offered = own, frozenset(worker.incarnation for worker in takers)
        last, offered = self._last_offered
        if self.registered is None:
            return AdapterNames(last, offered=offered)
        former = {} if last else self.registered.reported.all()
        return AdapterNames(last, offered=offered, registered=self.registered.all(), former=former)

    @property
    def announced_adapters(self) -> tuple[str, ...]:
        """Names that it is expected to have, loaded or not."""
        return () if self.registered is None else self.registered.announced.names

    def expects(self, name: str) -> bool:
        """Whether an adapter of this name is announced, and stands for nothing yet."""
        return name in self.announced_adapters and self.adapters.find(name) is None

    def expected_for(self, caller: Caller) -> tuple[str, ...]:
        """Those that `caller` may use."""
        adapters = self.adapters
        names = (name for name in self.announced_adapters if self.may_use_adapter(caller, name))
        return tuple(name for name in names if adapters.find(name) is None)

    def reported_adapters(self) -> Mapping[str, ServedAdapter] | None:
        """What names stand for at its workers. None where there are none."""
        own = tuple(worker for worker in self.workers() if worker.model == self.name)
        offered = frozenset(worker.incarnation for worker in self.offered())
        return AdapterNames(own, offered=offered).all() if own else None

    def adapters_for(self, caller: Caller) -> dict[str, ServedAdapter]:
        """Those that `caller` may use, by name."""
        return {
            name: adapter for name, adapter in sorted(self.adapters.all().items()) if self.may_use_adapter(caller, name)
        }

    def may_use_adapter(self, caller: Caller, name: str) -> bool:
        """A key for the model is none for its adapters: it has to list them, by either of their names."""
        return caller.may_use(name, model=f"{self.name}:{name}")

    def adapter_card(self, adapter: ServedAdapter, *, name: str) -> ModelCard:
        """Of an adapter, which clients call `name`."""
        return ModelCard(
            id=name,
            created=self.created,
            root=adapter.root,
            max_model_len=self.context_length,
            parent=self.name,
        )

    def expected_card(self, *, name: str) -> ModelCard:
        """Of an adapter that stands for nothing yet, which clients call `name`."""
        own = name.rpartition(":")[2]
        return ModelCard(id=name, created=self.created, root=own, max_model_len=self.context_length, parent=self.name)

    def card(self, name: str) -> ModelCard:
        """Of the model under one of its names."""
        return ModelCard(id=name, created=self.created, root=self.root or self.name, max_model_len=self.context_length)


MAX_FILE_BYTES = 1 << 20
Length = Annotated[int, msgspec.Meta(ge=1)]


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part about text of a model that has others."""

    max_position_embeddings: Length | None = None


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of `config.json` what is needed here."""

    max_position_embeddings: Length | None = None
    text_config: TextConfig = TextConfig()


def checkpoint_length(folder: Path) -> int:
    """Tokens of prompt and output. Raises `CheckpointError` naming the file where it does not say."""
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
        config = msgspec.json.decode(content, type=CheckpointConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: its context length cannot be read ({error})") from error
    length = config.max_position_embeddings or config.text_config.max_position_embeddings
    if length is None:
        raise CheckpointError(f"{path}: no max_position_embeddings; --from-zero-timeout needs it")
    return length
