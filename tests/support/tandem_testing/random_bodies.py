"""Request bodies at random, over every field of every endpoint that reads one; the same ones for the same seed.

They are made from the JSON schemas of the structs that the gateway decodes, so that a new field is in them at once: a
sound request, some fields as its schema allows them, and in one of ten a value of no shape at all somewhere in it.
"""

import copy
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from tandem_services.gateway.api.anthropic.schemas import MessagesRequest
from tandem_services.gateway.api.embeddings import EmbeddingRequest
from tandem_services.gateway.api.openai_schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tandem_services.gateway.api.responses.schemas import ResponsesRequest

Schema = dict[str, Any]

HI = [{"role": "user", "content": "hi"}]
SHAPES: dict[str, tuple[type[msgspec.Struct], Schema]] = {
    "/v1/chat/completions": (ChatRequest, {"model": "mock", "messages": HI, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"model": "mock", "prompt": "hi", "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"model": "mock", "input": "hi", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"model": "mock", "messages": HI, "max_tokens": 2}),
    "/v1/messages/count_tokens": (MessagesRequest, {"model": "mock", "messages": HI}),
    "/v1/embeddings": (EmbeddingRequest, {"model": "mock", "input": "hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
"""By path: what its bodies are decoded to, and a request that is served."""
GENERATING = tuple(SHAPES)[:4]

TEXTS = (
    "", "a", "mock", "f", "\x00\x1b", "\u00e9\U0001f600", "<|im_end|>", "a" * 300, "(a+)+$", "^[a-z]{1,9}$",
    'root ::= "a"', '{"type": "object"}', "default", "auto", "none",
)  # fmt: skip
INTEGERS = (-(2**63) - 1, -1, 0, 1, 2, 5, 20, 128, 129, 2**31, 2**63, 10**30)
NUMBERS = (-1e308, -1.0, 0.0, 1e-12, 0.5, 1.0, 2.0, 1e308)
MAX_FIELDS = 4
"""That a body has beside those that it must have."""
DEEPEST = 3
"""Of what has no shape."""


def definitions_of(shape: type[msgspec.Struct]) -> tuple[Schema, Schema]:
    """The schema of `shape` and those that it refers to, by name."""
    (schema,), definitions = msgspec.json.schema_components([shape], ref_template="#/{name}")
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema, definitions


DEFINITIONS = {path: definitions_of(shape) for path, (shape, _) in SHAPES.items()}


def fields_of(path: str) -> frozenset[str]:
    """Names of all that a body may say."""
    return frozenset(DEFINITIONS[path][0]["properties"])


@dataclass(slots=True)
class RandomBodies:
    """Bodies of one endpoint."""

    path: str
    random: Random
    definitions: Schema = field(init=False)

    def __post_init__(self) -> None:
        self.definitions = DEFINITIONS[self.path][1]

    def body(self) -> Schema:
        sound = copy.deepcopy(SHAPES[self.path][1])
        made = self._value(DEFINITIONS[self.path][0])
        body = {**sound, **made}
        if self.random.random() < 0.6:
            body |= sound
        if self.random.random() < 0.1:
            self._spoil(body)
        return body

    def _spoil(self, body: Any) -> None:
        """Put something of no shape somewhere."""
        here = body
        while True:
            place = self.random.choice([*here] if isinstance(here, dict) else range(len(here)))
            below = here[place]
            if not isinstance(below, dict | list) or not below or self.random.random() < 0.5:
                here[place] = self._anything(DEEPEST)
                return
            here = below

    def _value(self, schema: Schema) -> Any:
        if "$ref" in schema:
            return self._value(self.definitions[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return self._value(self.random.choice(schema["anyOf"]))
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        match schema.get("type"):
            case "array":
                return [self._value(schema.get("items") or {}) for _ in range(self.random.choice((0, 1, 1, 2, 3)))]
            case "object" if "properties" in schema:
                return self._object(schema)
            case "object":
                below = schema.get("additionalProperties")
                below = below if isinstance(below, dict) else {}
                return {self._text(): self._value(below) for _ in range(self.random.choice((0, 1, 2)))}
            case str(kind):
                return self._simple()[kind]()
        return self._anything(DEEPEST)

    def _object(self, schema: Schema) -> Schema:
        required = schema.get("required", ())
        rest = [name for name in schema["properties"] if name not in required]
        chosen = self.random.sample(rest, min(len(rest), self.random.randint(0, MAX_FIELDS)))
        return {name: self._value(schema["properties"][name]) for name in (*required, *chosen)}

    def _anything(self, depth: int) -> Any:
        kind = self.random.choice((*self._simple(), *(("list", "dict") if depth else ())))
        if kind == "list":
            return [self._anything(depth - 1) for _ in range(self.random.randint(0, 3))]
        if kind == "dict":
            return {self._text(): self._anything(depth - 1) for _ in range(self.random.randint(0, 3))}
        return self._simple()[kind]()

    def _simple(self) -> dict[str, Callable[[], Any]]:
        return {
            "string": self._text,
            "integer": lambda: self.random.choice((self.random.choice(INTEGERS), self.random.randint(-3, 30))),
            "number": lambda: self.random.choice((self.random.choice(NUMBERS), self.random.uniform(-3, 3))),
            "boolean": lambda: self.random.random() < 0.5,
            "null": lambda: None,
        }

    def _text(self) -> str:
        if self.random.random() < 0.5:
            return self.random.choice(TEXTS)
        return "".join(self.random.choices(string.printable + "\u00fc\u6f22", k=self.random.randint(0, 5)))
