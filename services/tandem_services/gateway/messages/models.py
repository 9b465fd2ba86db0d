"""Models as Anthropic's clients list them: those that send `anthropic-version`."""

from collections.abc import Mapping
from datetime import UTC, datetime

from tandem_services.gateway.messages.answer_schemas import MessagesModel, MessagesModelList
from tandem_services.gateway.openai_answers import ModelCard, ModelList

HEADER = "anthropic-version"


def models_answer(
    answer: ModelList | ModelCard, headers: Mapping[str, str]
) -> ModelList | ModelCard | MessagesModelList | MessagesModel:
    """`answer` in the shape that the client with these headers reads."""
    if HEADER not in headers:
        return answer
    if isinstance(answer, ModelCard):
        return _model(answer)
    models = [_model(card) for card in answer.data]
    return MessagesModelList(
        data=models, first_id=models[0].id if models else None, last_id=models[-1].id if models else None
    )


def _model(card: ModelCard) -> MessagesModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return MessagesModel(id=card.id, display_name=card.id, created_at=created)
