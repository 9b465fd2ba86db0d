"""Prints docs/request-fields.md, the tables of request fields, from the gateway's own tables and structs.

    .venv/bin/python tools/request_fields.py > docs/request-fields.md

A test compares the page with what this prints.
"""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import inspect

from tandem_services.gateway.api.anthropic.schemas import OTHER_BLOCKS, OTHER_TEXT_BLOCKS, MessagesRequest
from tandem_services.gateway.api.chat import OTHER_CHAT_PARTS
from tandem_services.gateway.api.embeddings import EmbeddingRequest
from tandem_services.gateway.api.openai_schemas import ChatRequest, CompletionRequest
from tandem_services.gateway.api.responses.schemas import OTHER_PARTS, ResponsesRequest
from tandem_services.gateway.api.sessions import CloseRequest, OpenRequest
from tandem_services.gateway.http.known_fields import (
    KNOWN_FIELDS,
    NESTED_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    is_refused,
    nested_objects,
    shape_fields,
)

COLUMNS: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "embeddings": EmbeddingRequest,
}
HEAD = """# Request fields

Every field of OpenAI's, Anthropic's, vLLM's and SGLang's requests, and what each generation route does with it.
`tools/request_fields.py` writes this page from the gateway's own table.

- **served**: the field has its meaning ([API](api.md), [sampling](sampling.md)).
- **no effect**: the gateway accepts any value, and it changes nothing, for the reason below.
- blank: the route refuses the field with a 400 that names it, unless the value asks for nothing (null, `false`, an
  empty value, or the default).

A field that is not in this table is ignored, or refused by name with `--strict-fields`. Fields of the objects within a
body are [below](#fields-of-objects-within-a-body).
"""
NESTED_HEAD = """
## Fields of objects within a body

`[]` is each element of a list; in parentheses is the `type` of an object that has several forms. What is not in this
table is refused with a 400 that names the field by its path, such as `messages[0].content[1].detail`. Refused fields of
the table are taken when they are null. Maps have the keys that clients give them: schemas, `logit_bias`, `metadata`,
`documents`, `chat_template_kwargs`.

| object | on | served | no effect | refused |
|---|---|---|---|---|
"""
FORMS_OF_OTHERS = {
    "ContentPart": frozenset(OTHER_CHAT_PARTS),
    "TextPart": frozenset(OTHER_PARTS),
    "TextBlock": frozenset(OTHER_TEXT_BLOCKS),
    "Block": frozenset(OTHER_BLOCKS),
    "Tool": frozenset({"custom"}),
}
"""Fields that structs have so that objects of other types are refused with a sentence about the type."""


def page() -> str:
    top = [HEAD, *_table(), "", "Fields without effect:", "", *_reasons(WITHOUT_EFFECT)]
    nested = [NESTED_HEAD.rstrip("\n"), *_nested_table(), "", "Without effect:", "", *_reasons(_nested_reasons()), ""]
    return "\n".join([*top, *nested])


def _table() -> Iterator[str]:
    yield f"| field | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---|" * len(COLUMNS)
    for field in sorted(KNOWN_FIELDS):
        yield f"| `{field}` | {' | '.join(_effect(shape, field) for shape in COLUMNS.values())} |"


def _effect(shape: type[msgspec.Struct], field: str) -> str:
    if field not in shape.__struct_encode_fields__:
        return ""
    # Anthropic's has the user's id in it.
    served = field not in WITHOUT_EFFECT or (field == "metadata" and shape is MessagesRequest)
    return "served" if served else "no effect"


def _reasons(reasons: Mapping[str, str]) -> Iterator[str]:
    for field, reason in sorted(reasons.items()):
        yield f"- `{field}`: {reason}"


def _nested_table() -> Iterator[str]:
    for (place, _), (shape, routes) in sorted(_places().items(), key=lambda each: each[0][0]):
        kinds: dict[str, list[str]] = {"served": [], "no effect": [], "refused": []}
        for field in shape_fields(shape):
            kinds[_nested_effect(shape, field)].append(f"`{field.encode_name}`")
        columns = " | ".join(" ".join(names) for names in kinds.values())
        yield f"| `{place}` | {', '.join(routes)} | {columns} |"


def _places() -> dict[tuple[str, str], tuple[type[msgspec.Struct], list[str]]]:
    """Objects by path and struct, each with the routes that have it."""
    found: dict[tuple[str, str], tuple[type[msgspec.Struct], list[str]]] = {}
    for route, body in COLUMNS.items():
        for place, shape in nested_objects(body):
            found.setdefault((place, shape.__name__), (shape, []))[1].append(route)
    for route, body in (("sessions", OpenRequest), ("/close_session", CloseRequest)):
        found["(the body)", body.__name__] = (body, [route])
    return found


def _nested_effect(shape: type[msgspec.Struct], field: inspect.Field) -> str:
    if is_refused(field) or field.encode_name in FORMS_OF_OTHERS.get(shape.__name__, ()):
        return "refused"
    return "no effect" if f"{shape.__name__}.{field.encode_name}" in NESTED_WITHOUT_EFFECT else "served"


def _nested_reasons() -> dict[str, str]:
    """By field, with each reason once."""
    reasons: dict[str, list[str]] = {}
    for place, reason in NESTED_WITHOUT_EFFECT.items():
        several = reasons.setdefault(place.partition(".")[2], [])
        if reason not in several:
            several.append(reason)
    return {field: "; ".join(several) for field, several in reasons.items()}


if __name__ == "__main__":
    print(page(), end="")
