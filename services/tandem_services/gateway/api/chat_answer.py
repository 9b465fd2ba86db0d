"""Writes `chat.completion` and `chat.completion.chunk` objects, the responses of chat completions."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from msgspec import UNSET, UnsetType

from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.common.errors import ApiError
from tandem_services.gateway.api import logprobs
from tandem_services.gateway.api.interface import WholeChoice, stop_reason
from tandem_services.gateway.api.openai_schemas import (
    AssistantMessage,
    CallDelta,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    FunctionDelta,
    PromptLogprobs,
    Usage,
)
from tandem_services.gateway.dispatch.plan import Choice, GenerationPlan
from tandem_services.gateway.http.errors import error_json
from tandem_services.gateway.http.sse import DONE, TextEvents, data_event, encode_json
from tandem_services.gateway.output.choice_text import ChoicePiece, ScoredToken
from tandem_services.gateway.output.parts import CallArguments, CallBegin, Content, Part, Reasoning, joined


class ChatFormat:
    """Implements `AnswerFormat`."""

    def __init__(self, answer_id: str, created: int, plan: GenerationPlan, vocabulary: Vocabulary) -> None:
        self._id = answer_id
        self._include_usage = plan.include_usage
        self._is_plain = plan.reading.is_plain
        self._call_id_characters = plan.reading.call_id_characters
        self._created = created
        self._model = plan.model
        self._vocabulary = vocabulary
        self._prompt = plan.choices[0].input_ids
        self._top = plan.returned_logprobs
        self._prompt_top = plan.prompt_logprobs
        self._no_usage: UnsetType | None = None if plan.include_usage or plan.continuous_usage else UNSET
        self._names = logprobs.TokenNames(vocabulary, by_id=plan.names_by_id)
        self._tells_ids = plan.returns_ids
        plain_stream = plan.stream and self._is_plain and not self._tells_ids
        self.text_events = TextEvents(self._text_event) if plain_stream else None

    def opening(self, choice: Choice, first: ChoicePiece, usage: Usage | None) -> bytes:
        del first  # a chat does not begin with its prompt
        delta = ChatDelta(role="assistant", content="", refusal=None)
        return self._chunk(ChatChunkChoice(index=choice.index, delta=delta), usage, self._prompt_ids())

    def chunk(self, piece: ChoicePiece, usage: Usage | None) -> bytes:
        ordinary = usage is None and piece.finish is None and not piece.scored and piece.text
        if ordinary and self.text_events is not None:
            return self.text_events.of(piece.index, piece.text)
        deltas = [ChatDelta(content=piece.text or UNSET)] if self._is_plain else self._deltas(piece)
        last = len(deltas) - 1
        return b"".join(
            [
                self._chunk(
                    ChatChunkChoice(
                        index=piece.index,
                        delta=delta,
                        logprobs=self._logprobs(piece.scored) if position == 0 and piece.scored else None,
                        finish_reason=None if position < last or piece.finish is None else piece.finish.reason,
                        stop_reason=UNSET if position < last else stop_reason(piece.finish),
                        token_ids=self._token_ids(piece.token_ids if position == 0 else ()),
                    ),
                    usage,
                )
                for position, delta in enumerate(deltas)
            ]
        )

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)
        return data_event(encode_json(chunk)) + DONE

    def failure(self, refusal: ApiError) -> bytes:
        return data_event(error_json(refusal)) + DONE

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        return encode_json(
            ChatResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._whole_choice(choice) for choice in choices],
                usage=usage,
                prompt_logprobs=self._prompt_logprobs(choices[0]),
                prompt_token_ids=self._prompt_ids(),
            )
        )

    def _prompt_logprobs(self, first: WholeChoice) -> PromptLogprobs | UnsetType:
        """Of the one prompt that all choices have."""
        if self._prompt_top is None or first.prompt_logprobs is None:
            return UNSET
        return logprobs.prompt_logprobs(self._prompt, first.prompt_logprobs, self._vocabulary, self._prompt_top)

    def _prompt_ids(self) -> Sequence[int] | UnsetType:
        return self._prompt if self._tells_ids else UNSET

    def _token_ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return list(ids) if self._tells_ids else UNSET

    def _chunk(
        self, choice: ChatChunkChoice, usage: Usage | None, prompt_ids: Sequence[int] | UnsetType = UNSET
    ) -> bytes:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=self._no_usage if usage is None else usage,
            prompt_token_ids=prompt_ids,
        )
        return data_event(encode_json(chunk))

    def _text_event(self, index: int, text: str) -> bytes:
        return self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=text)), None)

    def _deltas(self, piece: ChoicePiece) -> list[ChatDelta]:
        """One for the text and one for each step of a call: clients note the end of a call by the next chunk that is
        not its own, so the finish has one to itself as well."""
        calls = [ChatDelta(tool_calls=[call]) for call in self._call_deltas(piece)]
        content, reasoning = content_of(piece.parts), reasoning_of(piece.parts)
        text = ChatDelta(content=content or UNSET, reasoning_content=reasoning or UNSET, reasoning=reasoning or UNSET)
        before = [text] if content or reasoning or ((piece.scored or piece.token_ids) and not calls) else []
        ends_apart = piece.finish is not None and (calls or not before)
        return [*before, *calls, *([ChatDelta()] if ends_apart else [])]

    def _call_deltas(self, piece: ChoicePiece) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        for part in joined(piece.parts):
            match part:
                case CallBegin(index, name):
                    call_id = self._call_id(piece.index, index)
                    function = FunctionDelta(name=name, arguments="")
                    deltas.append(CallDelta(index=index, id=call_id, type="function", function=function))
                case CallArguments(index, text):
                    deltas.append(CallDelta(index=index, function=FunctionDelta(arguments=text)))
        return deltas

    def _call_id(self, choice: int, call: int) -> str:
        return call_id(self._id, choice, call, self._call_id_characters)

    def _whole_choice(self, choice: WholeChoice) -> ChatChoice:
        assert choice.finish is not None, f"choice {choice.index} has not finished"
        return ChatChoice(
            index=choice.index,
            message=self._message(choice),
            logprobs=self._logprobs(choice.scored),
            finish_reason=choice.finish.reason,
            stop_reason=choice.finish.stop,
            token_ids=self._token_ids(choice.token_ids),
        )

    def _message(self, choice: WholeChoice) -> AssistantMessage:
        if self._is_plain:
            return AssistantMessage(content=choice.text)
        calls = [
            CalledTool(
                id=self._call_id(choice.index, call.index),
                function=CalledFunction(name=call.name, arguments=arguments_of(choice.parts, call.index)),
            )
            for call in choice.parts
            if isinstance(call, CallBegin)
        ]
        content = content_of(choice.parts)
        reasoning = reasoning_of(choice.parts) or UNSET
        return AssistantMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )

    def _logprobs(self, scored: list[ScoredToken]) -> ChatLogprobs | None:
        return None if self._top is None else logprobs.chat_logprobs(scored, self._names, self._top)


def call_id(answer_id: str, choice: int, call: int, characters: int | None) -> str:
    """The id of a tool call: another one for each call of each choice of each answer."""
    digest = blake2b(f"{answer_id}/{choice}/{call}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}" if characters is None else digest[:characters]


def content_of(parts: Iterable[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, Content)])


def reasoning_of(parts: Iterable[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, Reasoning)])


def arguments_of(parts: Iterable[Part], index: int) -> str:
    """All arguments of call `index`."""
    return "".join([part.text for part in parts if isinstance(part, CallArguments) and part.index == index])
