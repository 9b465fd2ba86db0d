"""What is kept of compiled and of refused grammars."""

import pytest

from tandem_engine.base.errors import InvalidRequestError
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.compiler import GrammarCache
from tandem_testing.toy_grammar import ToyGrammar, ToyRule


def spec(number: int) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.REGEX, source=f"a{{{number}}}")


def compiled() -> ToyGrammar:
    return ToyGrammar(ToyRule())


def test_least_recently_used_grammar_goes_first():  # [grammar-bombs]
    cache = GrammarCache(2)
    grammars = [compiled() for _ in range(3)]
    cache.keep(spec(0), grammars[0])
    cache.keep(spec(1), grammars[1])
    assert cache.find(spec(0)) is grammars[0]
    cache.keep(spec(2), grammars[2])
    assert [cache.find(spec(number)) for number in range(3)] == [grammars[0], None, grammars[2]]


def test_refusal_is_remembered_with_its_reason():
    cache = GrammarCache(2)
    cache.keep_refusal(spec(0), InvalidRequestError("no", param="grammar"))
    with pytest.raises(InvalidRequestError, match="no") as refusal:
        cache.find(spec(0))
    assert refusal.value.param == "grammar"


def test_cached_rejections_are_bounded_and_evict_no_grammar():
    cache = GrammarCache(3)
    good = compiled()
    cache.keep(spec(0), good)
    for number in range(1, 1000):
        cache.keep_refusal(spec(number), InvalidRequestError("no"))
    assert cache.find(spec(0)) is good
    assert len(cache) == 4


def test_options_are_part_of_grammar_key():
    cache = GrammarCache(3)
    cache.keep(GrammarSpec(kind=GrammarKind.JSON_OBJECT), compiled())
    assert cache.find(GrammarSpec(kind=GrammarKind.JSON_OBJECT, whitespace_pattern="")) is None
