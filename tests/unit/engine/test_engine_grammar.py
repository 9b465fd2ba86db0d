"""Structured output on the bundled model, from its tokenizer to its text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tandem_engine.config import CacheConfig, EngineConfig, GrammarConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "models" / "tandem-mini"
PROMPT = "Tell me about a fox who lives near a river."


class Animal(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    legs: int
    wild: bool
    friends: list[str]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "wild": {"type": "boolean"},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "legs", "wild", "friends"],
    "additionalProperties": False,
}
ANIMAL = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
REGEX = GrammarSpec(kind=GrammarKind.REGEX, source=r"[A-Z][a-z]{2,8}, \d{2} years old\.")
BOMB = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer", "multipleOf": 100000007}')


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = EngineConfig(model_path=str(MODEL), dtype="float32", cache=CacheConfig(num_pages=300), threads=1)
    return load(config, progress=False)


@pytest.fixture(scope="module")
def engine(loaded):
    with Engine.build(loaded, loaded.config) as engine:
        yield engine
        assert engine.audit().problems == ()


def request(engine_text, rid: str, grammar: GrammarSpec | None, **sampling: object) -> GenerateRequest:
    params = {"max_tokens": 120, "temperature": 0.0, "grammar": grammar, **sampling}
    return GenerateRequest(rid=rid, input_ids=tuple(engine_text.encode(PROMPT)), sampling=SamplingParams(**params))


def text_of(loaded: LoadedModel, output: Generation) -> str:
    return loaded.text.decode(output.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_json_by_a_schema_is_of_that_type_at_any_temperature(engine, loaded, temperature):
    requests = [
        request(loaded.text, f"t{temperature}-{seed}", ANIMAL, temperature=temperature, seed=seed) for seed in range(4)
    ]
    for output in engine.generate(requests):
        assert output.finish.reason is FinishReason.STOP
        animal = msgspec.json.decode(text_of(loaded, output), type=Animal)
        assert len(animal.friends) <= 2


def test_truncated_output_has_finish_reason_length(engine, loaded):
    (output,) = engine.generate([request(loaded.text, "cut", ANIMAL, max_tokens=5)])
    assert output.finish.reason is FinishReason.LENGTH


def test_grammar_rows_do_not_change_output_of_other_rows(engine, loaded):
    alone = engine.generate([request(loaded.text, "alone", None, max_tokens=30, ignore_eos=True)])[0]
    mixed = engine.generate(
        [
            request(loaded.text, "m0", ANIMAL),
            request(loaded.text, "m1", None, max_tokens=30, ignore_eos=True),
            request(loaded.text, "m2", REGEX),
        ]
    )
    assert mixed[1].token_ids == alone.token_ids
    assert re.fullmatch(REGEX.source, text_of(loaded, mixed[2]))


def test_bomb_ends_as_a_bad_request_while_others_are_served(engine, loaded):
    bad, good = engine.generate([request(loaded.text, "bomb", BOMB), request(loaded.text, "good", REGEX)])
    assert (bad.finish.reason, bad.finish.code, bad.finish.param) == (FinishReason.ERROR, "invalid_request", "grammar")
    assert good.finish.reason is FinishReason.STOP
    again = engine.generate([request(loaded.text, "bomb-again", BOMB)])[0]
    assert again.finish.code == "invalid_request"


def test_grammar_end_stops_output_before_min_tokens(engine, loaded):
    grammar = GrammarSpec(kind=GrammarKind.CHOICE, source='["yes"]')
    (output,) = engine.generate([request(loaded.text, "yes", grammar, ignore_eos=True, min_tokens=20)])
    assert (text_of(loaded, output), output.finish.reason) == ("yes", FinishReason.STOP)


def test_logprobs_are_those_of_the_model_and_not_of_the_mask(engine, loaded):
    (output,) = engine.generate([request(loaded.text, "logprobs", REGEX, logprobs=3)])
    assert len(output.logprobs) == len(output.token_ids)
    tops = [token for logprob in output.logprobs for token, _ in logprob.top]
    assert not {*tops} <= {*output.token_ids}


@pytest.mark.parametrize("without", ["tokenizer", "backend"])
def test_engine_that_cannot_follow_grammars_refuses_them(loaded, without):
    if without == "tokenizer":
        model, config = replace(loaded, text=None, vocabulary=None), loaded.config
    else:
        model, config = loaded, replace(loaded.config, grammar=GrammarConfig(backend="none"))
    with Engine.build(model, config) as engine:
        refused, served = engine.generate(
            [request(loaded.text, "g", REGEX), request(loaded.text, "plain", None, max_tokens=2)]
        )
    assert (refused.finish.code, refused.finish.param) == ("invalid_request", "grammar")
    assert {"tokenizer": "needs a tokenizer", "backend": "--grammar-backend none"}[without] in refused.finish.error
    assert len(served.token_ids) <= 2


def test_grammar_vocabulary_is_built_once_and_shared(loaded):
    vocabulary = replace(loaded.vocabulary, _built=None)
    model = replace(loaded, vocabulary=vocabulary)
    with Engine.build(model, loaded.config) as first:
        assert vocabulary._built is None
        first.generate([request(loaded.text, "a", REGEX)])
    built = vocabulary._built
    assert built is not None
    with Engine.build(model, loaded.config) as second:
        second.generate([request(loaded.text, "a", REGEX)])
    assert vocabulary._built is built
