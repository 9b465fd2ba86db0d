"""The request fields of completions and chats, as axes of covering arrays.

A value of an axis is a part of a body: one field, or several that only mean something together. The first value of an
axis is allowed with every other. `REFUSED` lists pairs of values that a gateway answers with a 400, and the field that
it names; `WHOLE_ONLY`, values that it does not stream.

Every field of a route is in an axis, in `NOT_PAIRED` with the reason, or in the product's `WITHOUT_EFFECT`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tandem_testing.pairs.answers import Answer, streamed_answer, whole_answer
from tandem_testing.pairs.covering import Axis, Forbidden, Row, Value, covering_rows

Body = dict[str, Any]
Parts = Mapping[str, Body]
"""By name of a value."""

NOT_PAIRED = {
    "model": "every request has it",
    "return_token_ids": "every request has it: ids are compared",
    "stream": "how a row is sent",
    "stream_options": "every stream has them: usage is compared",
    "session_params": "a turn depends on those before: tests/integration/test_system_sessions.py",
}

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
GRAMMAR = 'root ::= "yes, it is" | "no, not at all"'
WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Genf"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
LATER = {"prompt_logprobs": 1, "logprob_start": 2}
STORY = "Once upon a time there was a little fox who"
QUESTION = {"role": "user", "content": "Tell me about a bear."}

SHAPES = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_whitespace_pattern", "regex", "ebnf", "json_schema", "allowed_token_ids"),
)
"""Fields that constrain an output."""

SHARED: Mapping[str, Parts] = {
    "drawing": {
        "greedy": {"temperature": 0},
        "seeded": {"temperature": 0.8, "seed": 7},
        "negative seed": {"seed": -5},
    },
    "top_p": {"absent": {}, "0.7": {"top_p": 0.7}},
    "top_k": {"absent": {}, "5": {"top_k": 5}, "-1": {"top_k": -1}},
    "min_p": {"absent": {}, "0.05": {"min_p": 0.05}},
    "min_tokens": {"absent": {}, "2": {"min_tokens": 2}},
    "presence": {"absent": {}, "0.6": {"presence_penalty": 0.6}},
    "frequency": {"absent": {}, "-0.4": {"frequency_penalty": -0.4}},
    "repetition": {"absent": {}, "1.2": {"repetition_penalty": 1.2}},
    "bias": {"absent": {}, "two tokens": {"logit_bias": {"300": 4, "265": -100}}},
    "bad words": {"absent": {}, "two": {"bad_words": ["the", "was"]}},
    "stop": {
        "absent": {},
        "one": {"stop": "."},
        "two": {"stop": [" a", "ed"]},
        "kept": {"stop": [" a"], "include_stop_str_in_output": True},
        "kept, other name": {"stop": [" a"], "no_stop_trim": True},
        "tokens": {"stop_token_ids": [*range(300, 306)]},
    },
    "ignore_eos": {"absent": {}, "true": {"ignore_eos": True}},
    "special tokens": {
        "absent": {},
        "shown": {"skip_special_tokens": False},
        "none added": {"add_special_tokens": False},
    },
    "truncation": {
        "absent": {},
        "left": {"truncate_prompt_tokens": 5},
        "right": {"truncate_prompt_tokens": 6, "truncation_side": "right"},
        "room": {"truncate_prompt_tokens": -1},
    },
    "cache_salt": {"absent": {}, "given": {"cache_salt": "salt"}},
    "priority": {"absent": {}, "3": {"priority": 3}, "-2": {"priority": -2}},
    "patience": {"absent": {}, "timeout": {"timeout": 900}, "slo": {"slo": {"ttft_ms": 50_000, "tpot_ms": 9_000}}},
    "client": {
        "absent": {},
        "cache key": {"prompt_cache_key": "pairs"},
        "session": {"session_id": "pairs"},
        "user": {"user": "pairs"},
        "request id": {"request_id": "pairs"},
        "rid": {"rid": "pairs"},
    },
    "interval": {"absent": {}, "3": {"stream_interval": 3}},
    "choices": {"one": {}, "n 2": {"n": 2}, "best of 3": {"n": 2, "best_of": 3}},
    "id names": {"absent": {}, "true": {"return_tokens_as_token_ids": True}},
    "grammar": {
        "absent": {},
        "allowed tokens": {"allowed_token_ids": [*range(256, 1200)]},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "regex": {"regex": "[a-z ]{20,40}"},
        "ebnf": {"ebnf": GRAMMAR},
        "json_schema": {"json_schema": SCHEMA},
        "structured_outputs": {"structured_outputs": {"choice": ["red as a rose", "green as grass"]}},
        "guided_json": {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        "guided_regex": {"guided_regex": "[0-9]+"},
        "guided_choice": {"guided_choice": ["one by one", "two by two"]},
        "guided_grammar": {"guided_grammar": GRAMMAR},
    },
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two values, the second perhaps a way to send them, and the field that the 400 names."""

    one: Value
    other: Value
    param: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One endpoint whose answers are compared."""

    path: str
    always: Body = field(default_factory=lambda: {"return_token_ids": True})
    """In every body."""
    streamed: Body = field(default_factory=lambda: {"stream": True, "stream_options": {"include_usage": True}})
    """In a body whose answer is streamed."""
    whole_form: Callable[[httpx.Response], Answer] = whole_answer
    streamed_form: Callable[[httpx.Response], Answer] = streamed_answer
    axes: Mapping[str, Parts]
    refused: Sequence[Refusal]
    not_paired: Mapping[str, str]
    """Why a field is in no axis."""
    whole_only: Mapping[Value, str]
    """Values that are not streamed, with the field that the 400 names."""

    def body(self, row: Row) -> Body:
        """Of the row's values; those of axes that it leaves out are the first ones."""
        parts = (values[row.get(name, next(iter(values)))] for name, values in self.axes.items())
        return self.always | {name: value for part in parts for name, value in part.items()}

    def fields(self) -> set[str]:
        return {name for values in self.axes.values() for part in values.values() for name in part}

    def rows(self, seed: int, *, small: bool = False) -> list[Row]:
        """`small`: each axis has its first value and another one of the seed's."""
        random = Random(seed)
        axes = [
            Axis(name, _some(tuple(values), random) if small else tuple(values)) for name, values in self.axes.items()
        ]
        known = {value for axis in axes for value in axis.named()}
        forbidden = [Forbidden(each.one, each.other) for each in self.refused if {each.one, each.other} <= known]
        return covering_rows(axes, forbidden, seed=seed)

    def not_streamed(self, row: Row) -> set[str]:
        """Fields that a 400 may name where the row is streamed; empty when it is served."""
        return {self.whole_only[value] for value in row.items() if value in self.whole_only}


def _some(values: tuple[str, ...], random: Random) -> tuple[str, ...]:
    return values[0], random.choice(values[1:])


MORE_THAN_ONE = ("min_tokens", "2")
REFUSED = (Refusal(("length", "1"), MORE_THAN_ONE, "min_tokens"),)
WHOLE_ONLY = {
    ("choices", "best of 3"): "best_of",
    ("prompt logprobs", "1"): "prompt_logprobs",
    ("prompt logprobs", "later"): "prompt_logprobs",
    ("echo", "later logprobs"): "prompt_logprobs",
}

COMPLETIONS = Route(
    path="/v1/completions",
    not_paired={**NOT_PAIRED, "suffix": "refused: the bundled model has no tokens for it"},
    axes={
        **SHARED,
        "prompt": {
            "text": {"prompt": STORY},
            "two texts": {"prompt": [STORY, "The owl said"]},
            "ids": {"prompt": [300, 301, 290, 400, 512, 266]},
            "two lists of ids": {"prompt": [[300, 301, 290], [400, 512, 266, 270]]},
        },
        "length": {"10": {"max_tokens": 10}, "1": {"max_tokens": 1}, "0": {"max_tokens": 0}},
        "prompt logprobs": {"absent": {}, "1": {"prompt_logprobs": 1}},
        # A start is refused with echoed logprobs.
        "echo": {"absent": {}, "true": {"echo": True}, "later logprobs": LATER},
        "logprobs": {
            "absent": {},
            "0": {"logprobs": 0},
            "3": {"logprobs": 3},
            "named": {"logprobs": 0, "logprob_token_ids": [300, 400]},
        },
        "special words": {"absent": {}, "plain": {"parse_special_tokens": False}},
    },
    refused=(*REFUSED, Refusal(("length", "0"), MORE_THAN_ONE, "min_tokens")),
    whole_only=WHOLE_ONLY,
)

CHATS = Route(
    path="/v1/chat/completions",
    not_paired={
        **NOT_PAIRED,
        "echo": "refused in chats",
        "documents": "refused: the bundled model's chat template has no place for them",
        "reasoning_effort": "refused: the bundled model's chat template has no place for it",
        "thinking_token_budget": "refused: the bundled model does not reason",
        "include_reasoning": "the bundled model does not reason",
    },
    axes={
        **SHARED,
        "messages": {
            "one": {"messages": [QUESTION]},
            "system": {"messages": [{"role": "system", "content": "Be short."}, QUESTION]},
            "begun": {
                "messages": [QUESTION, {"role": "assistant", "content": "A bear"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        },
        "length": {"10": {"max_tokens": 10}, "9, other name": {"max_completion_tokens": 9}, "1": {"max_tokens": 1}},
        "logprobs": {
            "absent": {},
            "alone": {"logprobs": True},
            "2": {"logprobs": True, "top_logprobs": 2},
            "named": {"logprobs": True, "logprob_token_ids": [300, 400]},
        },
        "prompt logprobs": {"absent": {}, "1": {"prompt_logprobs": 1}, "later": LATER},
        "template": {"absent": {}, "variable": {"chat_template_kwargs": {"mood": "good"}}},
        "tools": {
            "absent": {},
            "none": {"tools": [WEATHER], "tool_choice": "none"},
            "auto": {"tools": [WEATHER]},
            "one at a time": {"tools": [WEATHER], "parallel_tool_calls": False},
            "required": {"tools": [WEATHER], "tool_choice": "required"},
            "named": {"tools": [WEATHER], "tool_choice": NAMED},
        },
    },
    refused=(
        *REFUSED,
        *(Refusal(("tools", choice), ("grammar", "allowed tokens"), "tools") for choice in ("required", "named")),
        *(
            Refusal(("tools", choice), ("grammar", grammar), next(iter(body)))
            for choice in ("auto", "one at a time", "required", "named")
            for grammar, body in SHARED["grammar"].items()
            if grammar not in ("absent", "allowed tokens", "response_format")
        ),
    ),
    whole_only=WHOLE_ONLY,
)
ROUTES = (COMPLETIONS, CHATS)
