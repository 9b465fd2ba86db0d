"""Log probabilities in the two shapes that OpenAI's endpoints give them, and of prompts in vLLM's."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem_engine.messages.outputs import TokenLogprob
from tandem_engine.tokenizer.output_text import Detokenizer
from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.gateway.api.openai_schemas import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)
from tandem_services.gateway.output.choice_text import ScoredToken

_LOWEST = -9999.0
"""JSON has no -inf; the value that vLLM and OpenAI's older models answer instead."""


class TokenNames(NamedTuple):
    """What logprobs call tokens: by their text, or as `token_id:5`, which no two of them share."""

    vocabulary: Vocabulary
    by_id: bool = False

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.by_id else _text(self.vocabulary, token_id)


def chat_logprobs(scored: list[ScoredToken], names: TokenNames, top: int) -> ChatLogprobs:
    """`top` alternatives per token."""
    return ChatLogprobs(content=[_chat_token(token, names, top) for token in scored])


def completion_logprobs(
    scored: Sequence[ScoredToken], names: TokenNames, top: int, *, after: int = 0
) -> CompletionLogprobs:
    """The sampled token is always among `top_logprobs`, in addition to the `top` most likely.

    `after` is how many characters of the text come before the output: those of an echoed prompt.
    """
    return CompletionLogprobs(
        tokens=[names.of(token.token_id) for token in scored],
        token_logprobs=[max(token.logprob.logprob, _LOWEST) for token in scored],
        top_logprobs=[_completion_top(token.token_id, token.logprob, names, top) for token in scored],
        text_offset=[after + token.offset for token in scored],
    )


def echoed_logprobs(
    input_ids: Sequence[int], prompt: Sequence[TokenLogprob | None], names: TokenNames, top: int
) -> CompletionLogprobs:
    """As `completion_logprobs`, of the whole prompt. Nothing predicts its first token: null, as OpenAI has it."""
    pairs = list(zip(input_ids, prompt, strict=True))
    return CompletionLogprobs(
        tokens=[names.of(token_id) for token_id in input_ids],
        token_logprobs=[None if logprob is None else max(logprob.logprob, _LOWEST) for _, logprob in pairs],
        top_logprobs=[
            None if logprob is None else _completion_top(token_id, logprob, names, top) for token_id, logprob in pairs
        ],
        text_offset=_offsets(input_ids, names.vocabulary),
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Those of a text and of the one after it."""
    return CompletionLogprobs(
        tokens=[*first.tokens, *second.tokens],
        token_logprobs=[*first.token_logprobs, *second.token_logprobs],
        top_logprobs=[*first.top_logprobs, *second.top_logprobs],
        text_offset=[*first.text_offset, *second.text_offset],
    )


def prompt_logprobs(
    input_ids: Sequence[int], prompt: Sequence[TokenLogprob | None], vocabulary: Vocabulary, top: int
) -> PromptLogprobs:
    """One entry per prompt token, null before the first of `prompt`, which are those of its end."""
    skipped = len(input_ids) - len(prompt)
    entries = zip(input_ids[skipped:], prompt, strict=True)
    return [None] * skipped + [
        None if logprob is None else _prompt_entry(token_id, logprob, vocabulary, top) for token_id, logprob in entries
    ]


def _prompt_entry(
    token_id: int, logprob: TokenLogprob, vocabulary: Vocabulary, top: int
) -> dict[int, PromptTokenLogprob]:
    """The token itself, then the `top` most likely, each with its rank."""
    ranked = [(token_id, logprob.logprob, logprob.rank)]
    ranked += [(other, value, rank) for rank, (other, value) in enumerate(logprob.top[:top], 1) if other != token_id]
    return {
        other: PromptTokenLogprob(logprob=max(value, _LOWEST), rank=rank, decoded_token=_text(vocabulary, other))
        for other, value, rank in ranked
    }


def _offsets(input_ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Where each token begins in the text of all, in characters."""
    detokenizer = Detokenizer(vocabulary)
    offsets, characters = [], -1 if vocabulary.strips_first_space else 0
    for token_id in input_ids:
        offsets.append(max(characters, 0))
        characters += len(detokenizer.push(token_id))
    return offsets


def _chat_token(token: ScoredToken, names: TokenNames, top: int) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=names.of(token.token_id),
        logprob=max(token.logprob.logprob, _LOWEST),
        bytes=list(names.vocabulary.bytes_of(token.token_id)),
        top_logprobs=[
            TopLogprob(
                token=names.of(token_id),
                logprob=max(logprob, _LOWEST),
                bytes=list(names.vocabulary.bytes_of(token_id)),
            )
            for token_id, logprob in token.logprob.top[:top]
        ],
    )


def _completion_top(token_id: int, scored: TokenLogprob, names: TokenNames, top: int) -> dict[str, float]:
    alternatives: dict[str, float] = {}
    for other, logprob in scored.top[:top]:
        # Tokens that hold parts of characters may read the same: the likeliest keeps the name.
        alternatives.setdefault(names.of(other), max(logprob, _LOWEST))
    alternatives.setdefault(names.of(token_id), max(scored.logprob, _LOWEST))
    return alternatives


def _text(vocabulary: Vocabulary, token_id: int) -> str:
    return vocabulary.bytes_of(token_id).decode("utf-8", "replace")
