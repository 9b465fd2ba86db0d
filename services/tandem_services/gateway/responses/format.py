"""Response objects and the events of a streamed one, in the order of OpenAI's own.

created ─▶ in_progress ─▶ events of items ─▶ completed, or incomplete; failed where it cannot go on
"""

from typing import Any

from tandem_services.common.errors import ApiError
from tandem_services.gateway.answer_format import WholeChoice, encode_json
from tandem_services.gateway.choice_text import ChoiceFinish, ChoicePiece
from tandem_services.gateway.openai_answers import Usage
from tandem_services.gateway.plan import GenerationPlan, PlannedChoice
from tandem_services.gateway.responses.answer_schemas import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from tandem_services.gateway.responses.items import Event, OutputItems
from tandem_services.gateway.sse import named_event


class ResponsesFormat:
    """Implements `AnswerFormat`."""

    def __init__(self, answer_id: str, created: int, plan: GenerationPlan) -> None:
        self._id = answer_id
        self._created = created
        self._plan = plan
        self._items = OutputItems(answer_id)
        self._finish: ChoiceFinish | None = None
        self._sequence = 0

    def opening(self, choice: PlannedChoice, first: ChoicePiece, usage: Usage | None) -> bytes:
        del choice, first, usage
        begun = self._response("in_progress")
        return self._events(
            [{"type": "response.created", "response": begun}, {"type": "response.in_progress", "response": begun}]
        )

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        del usage
        events = self._items.add(piece.parts)
        if piece.finish is not None:
            events += self._end(piece.finish)
        return self._events(events)

    def closing(self, usage: Usage) -> bytes:
        response = self._finished(usage)
        return self._events([{"type": f"response.{response.status}", "response": response}])

    def failure(self, refusal: ApiError) -> bytes:
        error = ResponseError(code="server_error", message=str(refusal))
        return self._events([{"type": "response.failed", "response": self._response("failed", error=error)}])

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        assert choice.finish is not None, "the output has not ended"
        self._items.add(choice.parts)
        self._end(choice.finish)
        return encode_json(self._finished(usage))

    def _end(self, finish: ChoiceFinish) -> list[Event]:
        self._finish = finish
        return self._items.finish(complete=finish.reason != "length")

    def _finished(self, usage: Usage) -> ResponseObject:
        assert self._finish is not None, "the output has not ended"
        if self._finish.reason == "length":
            return self._response("incomplete", usage=_usage(usage), incomplete_details=IncompleteDetails())
        return self._response("completed", usage=_usage(usage))

    def _response(self, status: ResponseStatus, **ending: Any) -> ResponseObject:
        """`ending`: what its status brings with it."""
        return ResponseObject(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._plan.model,
            output=[*self._items.done],
            **self._plan.repeated,
            **ending,
        )

    def _events(self, events: list[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        self._sequence += 1
        return named_event(event["type"], encode_json({**event, "sequence_number": self._sequence - 1}))


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
