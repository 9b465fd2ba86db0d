"""Response objects and the events of a streamed one, in the order of OpenAI's own.

created ─▶ in_progress ─▶ events of items ─▶ completed, or incomplete; failed where it cannot go on
"""

from typing import Any

from tandem_services.common.errors import ApiError
from tandem_services.gateway.answer_format import WholeChoice, encode_json
from tandem_services.gateway.choice_text import ChoiceFinish, ChoicePiece
from tandem_services.gateway.openai_schemas import Usage
from tandem_services.gateway.plan import GenerationPlan, PlannedChoice
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
        return self._events([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, refusal: ApiError) -> bytes:
        error = {"code": "server_error", "message": str(refusal)}
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

    def _finished(self, usage: Usage) -> dict[str, Any]:
        assert self._finish is not None, "the output has not ended"
        if self._finish.reason == "length":
            return self._response("incomplete", usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", usage=usage)

    def _response(self, status: str, *, usage: Usage | None = None, **fields: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._plan.model,
            "output": [*self._items.done],
            "usage": None if usage is None else _usage(usage),
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            **self._plan.repeated,
            **fields,
        }

    def _events(self, events: list[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        self._sequence += 1
        return named_event(event["type"], encode_json({**event, "sequence_number": self._sequence - 1}))


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
