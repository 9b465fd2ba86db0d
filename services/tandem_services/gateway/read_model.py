"""What it takes to read requests for a model: a gateway has it, and a stand-alone router, which serves none of them."""

from typing import Protocol

from tandem_services.gateway.models import ServedModel
from tandem_services.gateway.prompts import PromptEncoder
from tandem_services.gateway.session_turns import SessionDesk


class ReadModel(Protocol):
    """See `ModelService`."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def prompts(self) -> PromptEncoder: ...

    @property
    def desk(self) -> SessionDesk: ...
