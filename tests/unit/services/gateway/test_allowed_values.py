"""A word that is none of a few is answered with the few."""

from typing import Literal

import msgspec
import pytest

from tandem_services.gateway.http.body import allowed_values


class Part(msgspec.Struct):
    kind: Literal["text", "image"] = msgspec.field(default="text", name="type")


class Body(msgspec.Struct):
    parts: list[Part] | str | None = None
    effort: Literal["low", "high"] | None = None
    by_name: dict[str, Literal[1, 2]] = {}
    free: str = ""


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("effort", ("high", "low")),
        ("parts[3].type", ("image", "text")),
        ("by_name[...]", (1, 2)),
        ("free", ()),
        ("parts[0].kind", ()),
        ("nowhere.at[0].all", ()),
    ],
)
def test_values_of_a_field_are_found_by_its_path(path, values) -> None:
    assert allowed_values(Body, path) == values


async def test_unknown_message_role_is_refused_with_the_valid_ones(gateway) -> None:
    body = {"model": "mock", "messages": [{"role": "wizard", "content": "x"}]}
    answer = (await gateway.http.post("/v1/chat/completions", json=body)).json()["error"]
    assert answer["param"] == "messages[0].role"
    assert answer["message"].startswith("messages[0].role: invalid enum value 'wizard': use one of ")
    assert {"system", "user", "assistant", "tool"} <= {*answer["message"].rpartition("of ")[2].split(", ")}
