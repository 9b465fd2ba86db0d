"""Request fields that name tokens: `logit_bias`, `allowed_token_ids`, `logprob_token_ids` and `bad_words`.

The functions are pure, and bounded before anything is encoded. A bad word is encoded as at the beginning of a text and
as after a space. vLLM drops the second form if its number of tokens differs from the first; here it is dropped only if
it ends in the first, which then forbids both.
"""

from collections.abc import Mapping, Sequence

from tandem_engine.base.logs import quoted
from tandem_engine.messages.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import bad_request
from tandem_services.gateway.limits import (
    MAX_BAD_WORD_CHARACTERS,
)

MAX_WORDS = MAX_BAD_WORDS // 2
"""Each may take two token sequences."""

MAX_NAMED_KEYS = 8
"""Of a bad logit_bias, in the answer: others are counted."""


def logit_biases(biases: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's object of token id → bias. Raises `ApiError` 400 naming all keys that are no token ids."""
    if not biases:
        return ()
    if len(biases) > MAX_LOGIT_BIASES:
        raise bad_request(f"logit_bias takes at most {MAX_LOGIT_BIASES} entries, got {len(biases)}", "logit_bias")
    strange = [key for key in biases if not _is_token_id(key)]
    if strange:
        names = ", ".join(map(quoted, strange[:MAX_NAMED_KEYS]))
        more = f" and {len(strange) - MAX_NAMED_KEYS} more" if len(strange) > MAX_NAMED_KEYS else ""
        raise bad_request(f"logit_bias: not a token id: {names}{more}", "logit_bias")
    for key in biases:
        if not 0 <= int(key) < vocab_size:
            raise bad_request(
                f"logit_bias: token id {quoted(key)} is out of vocabulary, which has {vocab_size} tokens", "logit_bias"
            )
    return tuple((int(key), bias) for key, bias in biases.items())


def allowed_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    """Raises `ApiError` 400 for an empty list: no token could be generated."""
    if ids is not None and not ids:
        raise bad_request("allowed_token_ids must have at least one token id", "allowed_token_ids")
    return tuple(ids or ())


def named_ids(ids: Sequence[int] | None, *, logprobs: int | None) -> tuple[int, ...]:
    """`logprob_token_ids`. Raises `ApiError` 400 for an empty list, and without logprobs."""
    if ids is None:
        return ()
    if not ids:
        raise bad_request("logprob_token_ids must have at least one token id", "logprob_token_ids")
    if logprobs is None:
        raise bad_request("logprob_token_ids is only allowed with logprobs: ask for them too", "logprob_token_ids")
    return tuple(ids)


def bad_word_ids(words: Sequence[str] | None, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of `words`. Raises `ApiError` 400 naming a word that is empty or too long."""
    if not words:
        return ()
    if len(words) > MAX_WORDS:
        raise bad_request(f"bad_words takes at most {MAX_WORDS} words, got {len(words)}", "bad_words")
    spellings = (ids for position, word in enumerate(words) for ids in _spellings(word, position, tokenizer))
    return tuple(dict.fromkeys(spellings))


def _is_token_id(key: str) -> bool:
    digits = key.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) <= 18


def _spellings(word: str, position: int, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    bare = word.lstrip()
    if not bare or len(word) > MAX_BAD_WORD_CHARACTERS:
        raise bad_request(
            f"bad_words[{position}] must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, one of them no space, "
            f"got {len(word)}",
            "bad_words",
        )
    first, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}"))
    for ids in (first, spaced):
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise bad_request(
                f"bad_words[{position}] has {len(ids)} tokens, the limit is {MAX_BAD_WORD_TOKENS}", "bad_words"
            )
    return [first] if spaced[-len(first) :] == first else [first, spaced]
