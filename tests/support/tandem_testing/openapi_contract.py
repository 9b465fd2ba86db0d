"""An OpenAPI document as a judge of real answers."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jsonschema_rs

Schema = dict[str, Any]
OPEN = frozenset({"ResponseEvent", "MessageEvent"})
"""Answers with more fields than their schema names, on purpose."""


class Contract:
    """Answers must be as `document` says, and have no field that it does not name."""

    def __init__(self, document: Schema) -> None:
        self.document = document

    def check(self, method: str, path: str, status: int, media_type: str, body: Any) -> None:
        """Raises `AssertionError` or `jsonschema_rs.ValidationError`."""
        response = self._response(method, path, status)
        kind = media_type.partition(";")[0]
        named = {name.partition(";")[0]: content for name, content in response.get("content", {}).items()}
        assert kind in named, (path, status, media_type, sorted(named))
        self.validate(named[kind]["schema"], body)

    def check_events(self, method: str, path: str, documents: list[Any]) -> None:
        content = self._response(method, path, 200)["content"]["text/event-stream"]
        error = self._response(method, path, 400)["content"]["application/json"]["schema"]
        for document in documents:
            self.validate(error if "error" in document else content["x-event-schema"], document)

    def validate(self, schema: Schema, body: Any) -> None:
        jsonschema_rs.validator_for({**schema, "components": self._closed}).validate(body)

    def operation(self, method: str, path: str) -> Schema:
        return self.document["paths"][self._template(path)][method.lower()]

    def _template(self, path: str) -> str:
        paths = self.document["paths"]
        if path in paths:
            return path
        return next(name for name in paths if re.fullmatch(re.sub(r"\{\w+\}", ".+", name), path))

    def _response(self, method: str, path: str, status: int) -> Schema:
        responses = self.operation(method, path)["responses"]
        assert str(status) in responses, (method, path, status, sorted(responses))
        return self.resolve(responses[str(status)])

    def resolve(self, schema: Schema) -> Schema:
        if "$ref" not in schema:
            return schema
        found: Any = self.document
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        return found

    @cached_property
    def _closed(self) -> Schema:
        schemas = {
            name: {**schema, "additionalProperties": False} if "properties" in schema and name not in OPEN else schema
            for name, schema in self.document["components"]["schemas"].items()
        }
        return {**self.document["components"], "schemas": schemas}


def references(document: Any) -> Iterator[str]:
    """Every `$ref`, and every target of a discriminator."""
    match document:
        case {"discriminator": {"mapping": mapping}, **rest}:
            yield from mapping.values()
            yield from references(rest)
        case dict():
            for key, value in document.items():
                if key == "$ref":
                    yield value
                else:
                    yield from references(value)
        case list():
            for value in document:
                yield from references(value)
