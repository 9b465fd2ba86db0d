"""An output that is continued from any of its positions by another engine is the same output [resume-from-tokens].

The gateway sends a request again with the tokens it has, so a continuation depends on nothing but prompt,
parameters and these tokens: noise on the position, penalties on the tokens, a grammar on their replay, a stop string
on their text.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from tandem_engine.config import CacheConfig, EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.messages.outputs import FinishReason
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "models" / "tandem-mini"
PROMPT = "Tell me about a fox who lives near a river."
LENGTH = 24
EOS = 2
LOGPROB_TOLERANCE = 1e-4

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": " the", "schema": SCHEMA, "end": "."}], "triggers": [" the"]}


def grammar(kind: GrammarKind, source: object) -> dict[str, object]:
    text = source if isinstance(source, str) else json.dumps(source)
    return {"grammar": GrammarSpec(kind=kind, source=text), "max_tokens": 60}


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind of request; `finish` is how its whole output must end for the test to mean anything."""

    name: str
    sampling: dict[str, object]
    finish: FinishReason = FinishReason.LENGTH


NOISE = {"temperature": 0.9, "seed": 11}
KINDS = [
    Kind("greedy", {}),
    Kind("seeded", {**NOISE, "top_p": 0.9, "top_k": 40}),
    Kind("min-p", {**NOISE, "min_p": 0.05}),
    Kind("penalties", {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    Kind("penalties-seeded", {**NOISE, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    Kind("logit-bias", {"logit_bias": ((30, 3.0), (31, -50.0)), **NOISE}),
    Kind("min-tokens", {"min_tokens": 12, "ignore_eos": False, "logit_bias": ((1, 6.0), (2, 6.0)), **NOISE}),
    Kind("allowed", {"allowed_token_ids": tuple(range(40, 80)), **NOISE}),
    Kind("logprobs", {"logprobs": 3, "temperature": 0.7, "seed": 4}),
    Kind("json-schema", grammar(GrammarKind.JSON_SCHEMA, SCHEMA), FinishReason.STOP),
    Kind("json-schema-seeded", {**grammar(GrammarKind.JSON_SCHEMA, SCHEMA), **NOISE}, FinishReason.STOP),
    Kind("regex", grammar(GrammarKind.REGEX, r"[A-Z][a-z]{2,8}, \d{2} years old\."), FinishReason.STOP),
    Kind("choice", grammar(GrammarKind.CHOICE, ["a red fox", "a red river", "nothing"]), FinishReason.STOP),
    Kind("structural-tag", {**grammar(GrammarKind.STRUCTURAL_TAG, TAG), "logit_bias": ((EOS, -100.0),)}),
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = EngineConfig(model_path=str(MODEL), dtype="float32", cache=CacheConfig(num_pages=400), threads=1)
    return load(config, progress=False)


@pytest.fixture(scope="module")
def engines(loaded):
    """The first engine generates, the second continues."""
    with Engine.build(loaded, loaded.config) as first, Engine.build(loaded, loaded.config) as second:
        yield first, second
        assert second.audit().problems == ()


def request(loaded: LoadedModel, rid: str, sampling: dict[str, object], **fields: object) -> GenerateRequest:
    params = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True, **sampling}
    ids = tuple(loaded.text.encode(PROMPT))
    return GenerateRequest(rid=rid, input_ids=ids, sampling=SamplingParams(**params), **fields)


def continued(engine: Engine, whole: GenerateRequest, tokens: tuple[int, ...]) -> list[Generation]:
    """`whole` as other workers get it, after each number of its tokens."""
    return engine.generate(
        [structs.replace(whole, rid=f"{whole.rid}-{at}", resume_ids=tokens[:at]) for at in range(1, len(tokens))]
    )


def assert_same(whole: Generation, parts: list[Generation]) -> None:
    for at, part in enumerate(parts, 1):
        assert tuple(part.token_ids) == tuple(whole.token_ids[at:]), f"continued at {at}"
        assert part.finish == whole.finish, f"continued at {at}"
        assert part.prompt_logprobs is None
        scores = [(entry.rank, [token for token, _ in entry.top]) for entry in part.logprobs]
        assert scores == [(entry.rank, [token for token, _ in entry.top]) for entry in whole.logprobs[at:]]
        assert [entry.logprob for entry in part.logprobs] == pytest.approx(
            [entry.logprob for entry in whole.logprobs[at:]], abs=LOGPROB_TOLERANCE
        )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_output_resumes_identically_from_any_token(engines, loaded, kind):
    first, second = engines
    asked = request(loaded, kind.name, kind.sampling)
    (whole,) = first.generate([asked])
    assert (whole.finish.reason, len(whole.token_ids) > 1) == (kind.finish, True)
    assert_same(whole, continued(second, asked, tuple(whole.token_ids)))


def test_bad_word_across_resume_boundary_is_forbidden(engines, loaded):
    first, second = engines
    (free,) = first.generate([request(loaded, "free", {})])
    pairs = tuple(tuple(free.token_ids[at : at + 2]) for at in (3, 8, 15))
    asked = request(loaded, "words", {"bad_words": pairs})
    (whole,) = first.generate([asked])
    assert whole.token_ids != free.token_ids
    assert_same(whole, continued(second, asked, tuple(whole.token_ids)))


def test_stop_string_across_resume_boundary_ends_output(engines, loaded):  # [stop-strings]
    first, second = engines
    (free,) = first.generate([request(loaded, "free", {})])
    text = loaded.text.decode(free.token_ids, skip_special_tokens=True)
    middle = len(loaded.text.decode(free.token_ids[:12], skip_special_tokens=True))
    stop = text[middle - 6 : middle + 5]
    asked = request(loaded, "stop", {"stop": (stop,)})
    (whole,) = first.generate([asked])
    assert whole.finish.matched_stop == stop
    assert_same(whole, continued(second, asked, tuple(whole.token_ids)))


def test_stop_token_ends_resumed_output_at_same_place(engines, loaded):
    first, second = engines
    (free,) = first.generate([request(loaded, "free", NOISE)])
    asked = request(loaded, "stop-token", {**NOISE, "stop_token_ids": (free.token_ids[14],)})
    (whole,) = first.generate([asked])
    assert whole.finish.reason is FinishReason.STOP
    assert_same(whole, continued(second, asked, tuple(whole.token_ids)))


def test_group_choices_resume_each_from_its_own_token(engines, loaded):  # [resume-from-tokens]
    first, second = engines
    members = [
        request(loaded, f"member-{nth}", {**NOISE, "seed": nth, "logprobs": 1}, group="choices") for nth in range(4)
    ]
    wholes = first.generate(members)
    breaks = [3, 0, 17, 9]
    parts = second.generate(
        [
            structs.replace(member, resume_ids=tuple(whole.token_ids[:at]))
            for member, whole, at in zip(members, wholes, breaks, strict=True)
        ]
    )
    assert len({tuple(whole.token_ids) for whole in wholes}) == 4
    for whole, part, at in zip(wholes, parts, breaks, strict=True):
        assert tuple(part.token_ids) == tuple(whole.token_ids[at:])
        assert len(part.logprobs) == LENGTH - at


def test_output_resumed_twice_is_unchanged(engines, loaded):
    first, second = engines
    asked = request(loaded, "twice", {**NOISE, "frequency_penalty": 0.5, **grammar(GrammarKind.JSON_SCHEMA, SCHEMA)})
    (whole,) = first.generate([asked])
    ids = tuple(whole.token_ids)
    (again,) = second.generate([structs.replace(asked, rid="twice-1", resume_ids=ids[:4])])
    (last,) = first.generate([structs.replace(asked, rid="twice-2", resume_ids=(*ids[:4], *again.token_ids[:5]))])
    assert tuple(last.token_ids) == ids[9:]


def test_prompt_logprobs_do_not_depend_on_later_tokens(engines, loaded):
    """A worker that dies with them unsent leaves none of the output either; they come first."""
    first, second = engines
    asked = request(loaded, "scored", {"prompt_logprobs": 2, "logprobs": 1})
    (whole,) = first.generate([asked])
    assert whole.prompt_logprobs is not None
    bare = structs.replace(asked, sampling=asked.sampling.without_prompt_logprobs())
    for at, part in enumerate(continued(second, bare, tuple(whole.token_ids)), 1):
        assert tuple(part.token_ids) == tuple(whole.token_ids[at:])
        assert part.prompt_logprobs is None
