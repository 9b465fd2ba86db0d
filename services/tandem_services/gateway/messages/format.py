"""Message objects and the events of a streamed one, in the order of Anthropic's own.

message_start ─▶ ping ─▶ events of blocks ─▶ message_delta ─▶ message_stop; error where it cannot go on
"""

from typing import Any

from tandem_services.common.errors import ApiError
from tandem_services.gateway.answer_format import WholeChoice, encode_json
from tandem_services.gateway.choice_text import ChoiceFinish, ChoicePiece
from tandem_services.gateway.messages.blocks import Event, OutputBlocks
from tandem_services.gateway.messages.errors import anthropic_error
from tandem_services.gateway.openai_answers import Usage
from tandem_services.gateway.plan import GenerationPlan, PlannedChoice
from tandem_services.gateway.sse import named_event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat:
    """Implements `AnswerFormat`. Its plan wants usage with every piece, so that a stream can begin with it."""

    def __init__(self, request_id: str, plan: GenerationPlan) -> None:
        self._request_id = request_id
        self._id = f"msg_{request_id}"
        self._model = plan.model
        self._blocks = OutputBlocks(self._id, call_id_characters=plan.reading.call_id_characters)
        self._finish: ChoiceFinish | None = None

    def opening(self, choice: PlannedChoice, first: ChoicePiece, usage: Usage | None) -> bytes:
        del choice, first
        assert usage is not None, "planned without usage"
        return _events([{"type": "message_start", "message": self._message(usage)}, {"type": "ping"}])

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        del usage
        events = self._blocks.add(piece.parts)
        if piece.finish is not None:
            events += self._end(piece.finish)
        return _events(events)

    def closing(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._stopped(), "usage": _usage(usage)}
        return _events([delta, {"type": "message_stop"}])

    def failure(self, refusal: ApiError) -> bytes:
        return named_event("error", anthropic_error(refusal, self._request_id))

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        (choice,) = choices
        assert choice.finish is not None, "the output has not ended"
        self._blocks.add(choice.parts)
        self._end(choice.finish)
        return encode_json({**self._message(usage), "content": self._blocks.done, **self._stopped()})

    def _end(self, finish: ChoiceFinish) -> list[Event]:
        self._finish = finish
        return self._blocks.finish(cut=finish.reason == "length")

    def _message(self, usage: Usage) -> dict[str, Any]:
        """Before anything is in it."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stopped(self) -> dict[str, Any]:
        assert self._finish is not None, "the output has not ended"
        reason, stop = self._finish.reason, self._finish.stop
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "tool_calls" and not any(block["type"] == "tool_use" for block in self._blocks.done):
            # No call had input that could be read, so the message has no block to execute.
            return {"stop_reason": "end_turn", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def _events(events: list[Event]) -> bytes:
    return b"".join([named_event(event["type"], encode_json(event)) for event in events])


def _usage(usage: Usage) -> dict[str, Any]:
    """Here `input_tokens` are those that were not in a cache."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens},
    }
