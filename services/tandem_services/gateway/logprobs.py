"""Log probabilities in the two shapes that OpenAI's endpoints give them."""

from tandem_engine.tokenizer.vocabulary import Vocabulary
from tandem_services.gateway.choice_text import ScoredToken
from tandem_services.gateway.openai_schemas import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)

_LOWEST = -9999.0
"""JSON has no -inf; the value that vLLM and OpenAI's older models answer instead."""


def chat_logprobs(scored: list[ScoredToken], vocabulary: Vocabulary, top: int) -> ChatLogprobs:
    """`top` alternatives per token."""
    return ChatLogprobs(content=[_chat_token(token, vocabulary, top) for token in scored])


def completion_logprobs(scored: list[ScoredToken], vocabulary: Vocabulary, top: int) -> CompletionLogprobs:
    """The sampled token is always among `top_logprobs`, in addition to the `top` most likely."""
    return CompletionLogprobs(
        tokens=[_text(vocabulary, token.token_id) for token in scored],
        token_logprobs=[max(token.logprob.logprob, _LOWEST) for token in scored],
        top_logprobs=[_completion_top(token, vocabulary, top) for token in scored],
        text_offset=[token.offset for token in scored],
    )


def _chat_token(token: ScoredToken, vocabulary: Vocabulary, top: int) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=_text(vocabulary, token.token_id),
        logprob=max(token.logprob.logprob, _LOWEST),
        bytes=list(vocabulary.bytes_of(token.token_id)),
        top_logprobs=[
            TopLogprob(
                token=_text(vocabulary, token_id),
                logprob=max(logprob, _LOWEST),
                bytes=list(vocabulary.bytes_of(token_id)),
            )
            for token_id, logprob in token.logprob.top[:top]
        ],
    )


def _completion_top(token: ScoredToken, vocabulary: Vocabulary, top: int) -> dict[str, float]:
    alternatives: dict[str, float] = {}
    for token_id, logprob in token.logprob.top[:top]:
        # Tokens that hold parts of characters may read the same: the likeliest keeps the name.
        alternatives.setdefault(_text(vocabulary, token_id), max(logprob, _LOWEST))
    alternatives.setdefault(_text(vocabulary, token.token_id), max(token.logprob.logprob, _LOWEST))
    return alternatives


def _text(vocabulary: Vocabulary, token_id: int) -> str:
    return vocabulary.bytes_of(token_id).decode("utf-8", "replace")
