"""The model services behind one gateway, by the names that clients use.

A name that is not there, and one that a key may not use, are the same to a client: nobody learns what others have.
"""

from collections.abc import Iterator, Sequence

from starlette.types import Scope

from tandem_engine.logs import quoted
from tandem_services.common.errors import ApiError, bad_request, not_found
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.boundary import identify_model, identity_of
from tandem_services.gateway.model_service import ModelService
from tandem_services.gateway.openai_answers import ModelCard, ModelList

MOST_NAMED = 8
"""Models in the answer to a request for another one: the rest is told by /v1/models."""


class ModelCatalog:
    """All model services of a gateway, which may change while it serves."""

    def __init__(self, services: Sequence[ModelService]) -> None:
        """`services`: as of `replace`."""
        self.replace(services)

    def replace(self, services: Sequence[ModelService]) -> None:
        """From now on there are `services`: at least one, no two with a name in common.

        Requests that have found one of the former are answered by it (`ModelService.visits`).
        """
        self._services = tuple(services)
        self._by_name = {name: service for service in services for name in service.model.names}

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services)

    def find(self, name: str | None, caller: Caller) -> ModelService:
        """The service of the model `name`; without a name, the only one. Raises `ApiError` 400 when there are several
        and no name, and 404 for a name that is not there for `caller`."""
        if not name:
            if len(self._services) > 1:
                raise bad_request("model is required: this gateway serves several", "model")
            name = next(iter(self._services[0].model.names_for(caller)), self._services[0].model.name)
        service = self._by_name.get(name)
        if service is None or name not in service.model.names_for(caller):
            raise self._no_such_model(name, caller)
        return service

    def of_request(self, scope: Scope, name: str | None) -> ModelService:
        """As `find`, for the caller of the request in `scope`, which is known from now on to be answered by it."""
        served = self.find(name, identity_of(scope).caller)
        served.visits.begin()
        identify_model(scope, served.model.name, on_end=served.visits.end)
        return served

    def policies_of(self, model: str) -> str:
        """By a model's own name; "" where there is none of it any more."""
        service = self._by_name.get(model)
        return "" if service is None else service.policies

    def listing(self, caller: Caller) -> ModelList:
        """What `caller` may use, each name as a card."""
        return ModelList(data=[s.model.card(name) for s in self._services for name in s.model.names_for(caller)])

    def card(self, name: str, caller: Caller) -> ModelCard:
        """Raises `ApiError` 404."""
        return self.find(name, caller).model.card(name)

    def _no_such_model(self, name: str, caller: Caller) -> ApiError:
        names = [known for service in self._services for known in service.model.names_for(caller)]
        shown = ", ".join(names[:MOST_NAMED])
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        there = f" Available: {shown}{more}." if names else ""
        return not_found(f"The model '{quoted(name)}' does not exist.{there}", "model", reason="model_not_found")
