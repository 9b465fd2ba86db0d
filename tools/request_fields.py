"""Prints docs/request-fields.md, the table of request fields, from the gateway's own table and structs.

    .venv/bin/python tools/request_fields.py > docs/request-fields.md

A test compares the page with what this prints.
"""

from collections.abc import Iterator

import msgspec

from tandem_services.gateway.embedding_schemas import EmbeddingRequest
from tandem_services.gateway.messages.schemas import MessagesRequest
from tandem_services.gateway.openai_schemas import ChatRequest, CompletionRequest
from tandem_services.gateway.request_fields import KNOWN_FIELDS, WITHOUT_EFFECT
from tandem_services.gateway.responses.schemas import ResponsesRequest

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

A field that is not in this table is ignored, or refused by name with `--strict-fields`.
"""


def page() -> str:
    return "\n".join([HEAD, *_table(), "", "Fields without effect:", "", *_reasons(), ""])


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


def _reasons() -> Iterator[str]:
    for field, reason in sorted(WITHOUT_EFFECT.items()):
        yield f"- `{field}`: {reason}"


if __name__ == "__main__":
    print(page(), end="")
