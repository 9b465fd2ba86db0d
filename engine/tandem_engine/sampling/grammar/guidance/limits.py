"""How a grammar is compiled, in the probe process and in the engine alike: with the same limits."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(
    # About 20 MiB; the states of a grammar are shared by all who follow it.
    max_lexer_states=10_000,
    # What clients are told must not quote a parser's state.
    verbose_errors=False,
)
"""The rest are llguidance's own: they bound one mask to some 25 ms, after which the output ends with an error."""

SILENT = 0


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile. Raises nothing: see `LLMatcher.get_error`."""
    return LLMatcher(tokenizer, grammar, log_level=SILENT, limits=LIMITS)
