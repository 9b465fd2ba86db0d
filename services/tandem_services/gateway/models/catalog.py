"""The model services of one gateway, by the names that clients use, and their replacement when the models file changes.

`ModelCatalog` resolves names, those of models before those of adapters:

    model           its own name, or an alias
    adapter         the name that workers report for it, if it is of one model only
    model:adapter   the same with the name of its model

A client cannot distinguish an unknown name from one that its key may not use.

`LiveModels` applies a changed models file:

    1. open     everything new first: tokenizer, keys, router, sockets. A failure changes nothing
    2. switch   all names at once, in one step of the event loop
    3. close    services that are removed or changed finish their requests, queued ones included, and then close

The first fleet at start stays: its Redis counts the usage of tenants, and its key separates their caches. Everything
else of the file's first entry may change. With `independent` none has to stay, and `change_each` opens every model by
itself: one that cannot be opened keeps no other out.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from starlette.types import Scope

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.messages.control import ServedAdapter
from tandem_engine.messages.requests import AdapterRef
from tandem_services.common.errors import ApiError, bad_request, not_found
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.config import ModelConfig
from tandem_services.gateway.http.middleware import identify_model, identity_of
from tandem_services.gateway.models.adapters import ref_of
from tandem_services.gateway.models.awaited import AwaitedModel
from tandem_services.gateway.models.fleet_tokenizer import TokenizerMissingError
from tandem_services.gateway.models.model import ModelCard, ModelList
from tandem_services.gateway.models.service import Fleet, ModelService
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoadError

MAX_NAMED = 8
"""Models listed in the error for an unknown model; /v1/models lists all."""


class Named(NamedTuple):
    """What a name stands for."""

    service: ModelService
    adapter: AdapterRef | None
    """None: the model alone, unless an adapter is expected."""
    expected: str = ""
    """Name of an adapter that is announced, and stands for nothing yet."""

    async def resolved(self, tenant: Tenant) -> AdapterRef | None:
        """The adapter of the request, awaited where it is expected. Raises `ApiError`, see `ExpectedAdapters.find`."""
        return await self.service.expected.find(self.expected, tenant) if self.expected else self.adapter


class _Found(NamedTuple):
    service: ModelService
    adapter: ServedAdapter | None
    expected: str = ""


class ModelCatalog:
    """All model services of a gateway, which may change while it serves."""

    def __init__(self, services: Sequence[ModelService]) -> None:
        """`services`: as of `replace`."""
        self.unserved: Mapping[str, str] = {}
        """Why models of the file are not served as it has them, by their own names."""
        self.awaited: Mapping[str, AwaitedModel] = {}
        """Those of them whose tokenizer is awaited, by their own names."""
        self.replace(services)

    def replace(self, services: Sequence[ModelService]) -> None:
        """From now on there are `services`, no two with a name in common.

        Requests that have found a former service finish on it (`ModelService.open_requests`).
        """
        self._services = tuple(services)
        self._by_name = {name: service for service in services for name in service.model.names}

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services)

    def of_request(self, scope: Scope, name: str | None) -> Named:
        """What `name` stands for now; without a name, the only model. The request in `scope` is known from now on to be
        answered by it. Raises `ApiError` 400 for a name of several, or none where there are several models, 404 for
        a name that is not there for the caller, and 503 for a model whose tokenizer is awaited."""
        served, adapter, expected = self._find(name, identity_of(scope).caller)
        served.open_requests.begin()
        identify_model(scope, served.model.name, on_end=served.open_requests.end)
        return Named(served, None if adapter is None else ref_of(adapter), expected)

    def of_adapter(self, name: str, *, param: str) -> tuple[ModelService, str]:
        """The model of an adapter, loaded or not, and the adapter's own name, of NAME or MODEL:NAME.

        Raises `ApiError`: 400 without a model where there are several, 404 for an unknown one.
        """
        model, colon, own = name.rpartition(":")
        if not colon:
            if len(self._services) != 1:
                raise bad_request(f"{param}: send MODEL:NAME, this gateway may serve several models", param)
            return self._services[0], own
        if model not in self._by_name:
            names = ", ".join(service.model.name for service in self._services[:MAX_NAMED])
            raise not_found(
                f"The model '{quoted(model)}' does not exist. Available: {names}.", param, reason="model_not_found"
            )
        return self._by_name[model], own

    def names_a_model(self, name: str) -> bool:
        """Whether a model or an alias has this name, which takes precedence over adapters."""
        return name in self._by_name

    def select(self, name: str | None, cluster: str | None) -> ModelService | None:
        """What a command is about: the model of this name or alias, by default the first. None without it, and where
        it is another fleet's than `cluster`: the file may give its name to another one at any moment.
        """
        found = next(iter(self), None) if name is None else self._by_name.get(name)
        return found if found is not None and cluster in (None, found.cluster) else None

    def policies_of(self, model: str) -> str:
        """By a model's own name; "" where there is none of it any more."""
        service = self._by_name.get(model)
        return "" if service is None else service.policies

    def listing(self, caller: Caller) -> ModelList:
        """What `caller` may use, each name as a card."""
        models = [s.model.card(name) for s in self._services for name in s.model.names_for(caller)]
        adapters = [
            service.model.adapter_card(adapter, name=name)
            for name, (service, adapter) in self._adapters(caller).items()
        ]
        adapters += [service.model.expected_card(name=name) for name, service in self._expected(caller).items()]
        return ModelList(data=[*models, *adapters])

    def card(self, name: str, caller: Caller) -> ModelCard:
        """Raises `ApiError` 404."""
        service, adapter, expected = self._find(name, caller)
        if expected:
            return service.model.expected_card(name=name)
        return service.model.card(name) if adapter is None else service.model.adapter_card(adapter, name=name)

    def _find(self, name: str | None, caller: Caller) -> _Found:
        """Raises as `of_request`."""
        if not name and not self._services and len(self.awaited) == 1:
            name = next(iter(self.awaited))
        if not name:
            if len(self._services) != 1:
                raise bad_request("model is required: this gateway may serve several", "model")
            name = next(iter(self._services[0].model.names_for(caller)), self._services[0].model.name)
        service = self._by_name.get(name)
        if service is not None and caller.may_use(name, model=service.model.name):
            return _Found(service, None)
        found = None if service is not None else self._adapter(name, caller)
        if found is None:
            raise self._no_such_model(name, caller)
        return found

    def _adapter(self, name: str, caller: Caller) -> _Found | None:
        """None where there is none of this name for `caller`. Raises `ApiError` 400 for a name of several."""
        model, colon, own = name.rpartition(":")
        services: Sequence[ModelService] = self._services
        if colon:
            named = self._by_name.get(model)
            services = () if named is None else (named,)
        found = [
            _Found(service, adapter)
            for service in services
            if service.model.may_use_adapter(caller, own) and (adapter := service.model.adapters.find(own)) is not None
        ]
        found += [
            _Found(service, None, own)
            for service in services
            if service.model.may_use_adapter(caller, own) and service.model.expects(own)
        ]
        if len(found) > 1:
            names = " or ".join(f"'{quoted(each.service.model.name)}:{quoted(own)}'" for each in found[:MAX_NAMED])
            raise bad_request(f"Several models have an adapter '{quoted(own)}': send {names}.", "model")
        return found[0] if found else None

    def _adapters(self, caller: Caller) -> dict[str, tuple[ModelService, ServedAdapter]]:
        """All that `caller` may use, by the name that is enough."""
        each = [(s, name, adapter) for s in self._services for name, adapter in s.model.adapters_for(caller).items()]
        times = Counter(name for _, name, _ in each)
        times.update(name for service in self._services for name in service.model.expected_for(caller))
        return {
            name if times[name] == 1 and name not in self._by_name else f"{service.model.name}:{name}": (
                service,
                adapter,
            )
            for service, name, adapter in each
        }

    def _expected(self, caller: Caller) -> dict[str, ModelService]:
        """Announced adapters that stand for nothing yet, by the name that is enough in any case."""
        each = ((service, name) for service in self._services for name in service.model.expected_for(caller))
        only = len(self._services) == 1
        return {
            name if only and name not in self._by_name else f"{service.model.name}:{name}": service
            for service, name in each
        }

    def _no_such_model(self, name: str, caller: Caller) -> ApiError:
        for own, awaited in self.awaited.items():
            if name in awaited.names and caller.may_use(name, model=own):
                return awaited.refusal(name)
        names = [known for service in self._services for known in service.model.names_for(caller)]
        names += self._adapters(caller)
        shown = ", ".join(names[:MAX_NAMED])
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        there = f" Available: {shown}{more}." if names else ""
        return not_found(f"The model '{quoted(name)}' does not exist.{there}", "model", reason="model_not_found")


logger = logging.getLogger(__name__)


class OpenFleet(Protocol):
    """What a model service is built on, open."""

    @property
    def parts(self) -> Fleet: ...

    @property
    def outdated(self) -> bool:
        """It has to be opened again, although its configuration is the same."""
        ...


F = TypeVar("F", bound=OpenFleet)

FAULTS = (ConfigError, CheckpointError, RedisUnavailableError)
"""Why a fleet cannot be opened; the message is for people."""


class FleetDoor(Protocol[F]):
    """Opens and closes fleets."""

    async def open(self, model: ModelConfig) -> F:
        """Raises `FAULTS`."""
        ...

    async def close(self, fleet: F) -> None: ...


@dataclass(frozen=True, slots=True)
class _Member(Generic[F]):
    fleet: F
    service: ModelService

    @property
    def config(self) -> ModelConfig:
        return self.fleet.parts.config


@dataclass(kw_only=True, slots=True)
class LiveModels(Generic[F]):
    """See the module docstring. All methods belong to one event loop."""

    catalog: ModelCatalog
    door: FleetDoor[F]
    build: Callable[[Fleet], ModelService]
    opened: Sequence[F]
    """Of the catalog's services at the start, in their order."""
    independent: bool = False
    """No fleet has to stay."""
    absent: frozenset[str] = frozenset()
    """Models that the last `change_each` could not open because Redis or all workers with the tokenizer were absent, or
    have a tokenizer that cannot be loaded: an attempt costs little, and the next one may succeed."""
    unloadable: frozenset[str] = frozenset()
    """Those of them whose tokenizer cannot be loaded."""
    _members: list[_Member[F]] = field(init=False)
    _first: F | None = field(init=False)
    _retiring: dict[asyncio.Task[None], _Member[F]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._members = [_Member(fleet, service) for fleet, service in zip(self.opened, self.catalog, strict=True)]
        self._first = None if self.independent else self.opened[0]

    @property
    def fleets(self) -> list[F]:
        """Those that are served now."""
        return [member.fleet for member in self._members]

    @property
    def outdated(self) -> bool:
        """Whether one of them has to be opened again."""
        return any(fleet.outdated for fleet in self.fleets)

    @property
    def retiring(self) -> int:
        """Model services that finish."""
        return len(self._retiring)

    async def change(self, models: Sequence[ModelConfig]) -> None:
        """Serve `models` from now on, as `read_models` has checked them. Raises `ConfigError`, and as the door."""
        self._check_first(models[0])
        kept = self._unchanged(models)
        fresh = await self._open([model for model in models if model.names not in kept])
        self._switch([kept.get(model.names) or fresh[model.names] for model in models], fresh)

    async def change_each(self, models: Sequence[ModelConfig], faults: Mapping[str, str]) -> dict[str, str]:
        """Serve those of `models` that can be opened. Returns by name why the others, and those with `faults`, are not:
        of these, what a former entry of the same name has served is served as before.
        """
        kept = self._unchanged(models)
        missing = [model for model in models if model.names not in kept]
        fresh, refused = await self._open_each(missing)
        errors = {**faults, **refused}
        found = {**kept, **fresh}
        members = [found[model.names] for model in models if model.names in found]
        taken = {name for member in members for name in member.config.names}
        members += [
            member for member in self._members if member.config.name in errors and taken.isdisjoint(member.config.names)
        ]
        if members != self._members:
            self._switch(members, fresh)
        return errors

    def _unchanged(self, models: Sequence[ModelConfig]) -> dict[tuple[str, ...], _Member[F]]:
        return {
            member.config.names: member
            for member in self._members
            if member.config in models and not member.fleet.outdated
        }

    def _switch(self, members: list[_Member[F]], fresh: Mapping[tuple[str, ...], _Member[F]]) -> None:
        former, self._members = self._members, members
        for member in fresh.values():
            member.service.start()
        self.catalog.replace([member.service for member in members])
        gone = [member for member in former if member not in members]
        for member in gone:
            self._retire(member)
        fields = {"added": [m.config.name for m in fresh.values()], "removed": [m.config.name for m in gone]}
        logger.info("models changed", extra={"fields": fields})

    async def close(self) -> None:
        """At shutdown, when no request runs: what still finishes is closed."""
        unfinished = dict(self._retiring)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        for member in unfinished.values():
            await member.service.close()

    def _check_first(self, model: ModelConfig) -> None:
        if self._first is None:
            return
        first = self._first.parts.config
        if (model.redis, model.cluster, model.curve_keys) != (first.redis, first.cluster, first.curve_keys):
            raise ConfigError(
                "the first entry's redis_url, redis_password_file, cluster and curve_keys cannot change while the "
                "gateway runs: usage of keys is counted there. Add another entry after it, or restart the gateway"
            )

    async def _open(self, models: Sequence[ModelConfig]) -> dict[tuple[str, ...], _Member[F]]:
        async with AsyncExitStack() as opened:
            members = {}
            for model in models:
                fleet = await self.door.open(model)
                opened.push_async_callback(self.door.close, fleet)
                service = self.build(fleet.parts)
                opened.push_async_callback(service.close)
                members[model.names] = _Member(fleet, service)
            opened.pop_all()
        return members

    async def _open_each(
        self, models: Sequence[ModelConfig]
    ) -> tuple[dict[tuple[str, ...], _Member[F]], dict[str, str]]:
        """At once, so that one whose Redis is silent does not delay the others. And by name why some cannot."""
        absent: set[str] = set()
        unloadable: set[str] = set()

        async def attempt(model: ModelConfig) -> dict[tuple[str, ...], _Member[F]] | str:
            try:
                return await self._open([model])
            except FAULTS as error:
                if isinstance(error, TokenizerMissingError | TokenizerLoadError | RedisUnavailableError):
                    absent.add(model.name)
                if isinstance(error, TokenizerLoadError):
                    unloadable.add(model.name)
                return str(error)
            except Exception as error:
                # A defect that one entry meets keeps no other one out either.
                logger.exception("cannot open model %s", quoted(model.name))
                return f"the gateway failed, its log has the traceback: {type(error).__name__}: {error}"

        fresh: dict[tuple[str, ...], _Member[F]] = {}
        errors: dict[str, str] = {}
        outcomes = await asyncio.gather(*map(attempt, models))
        for model, outcome in zip(models, outcomes, strict=True):
            if isinstance(outcome, str):
                errors[model.name] = outcome
            else:
                fresh |= outcome
        self.absent, self.unloadable = frozenset(absent), frozenset(unloadable)
        return fresh, errors

    def _retire(self, member: _Member[F]) -> None:
        task = asyncio.create_task(self._finish(member), name=f"retirement of {member.config.name}")
        self._retiring[task] = member
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def _finish(self, member: _Member[F]) -> None:
        await member.service.open_requests.over()
        await member.service.close()
        if member.fleet is not self._first:
            await self.door.close(member.fleet)
        logger.info("model removed", extra={"fields": {"model": member.config.name}})
