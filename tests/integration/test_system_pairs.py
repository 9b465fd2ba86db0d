"""Every pair of values of request fields: answered the same whole, streamed, in a crowd, and by another fleet."""

import pytest

from tandem_testing.pairs.asking import Outcome, ask_refused, ask_rows, asking
from tandem_testing.pairs.fields import CHATS, COMPLETIONS, Route
from tandem_testing.pairs.other_apis import MESSAGES, RESPONSES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("system")]

SEED = 1
"""`make pairs` takes any, and all values of each field."""


def problems(outcomes: list[Outcome]) -> list[tuple[object, list[str]]]:
    return [(outcome.row, outcome.problems) for outcome in outcomes if outcome.problems]


@pytest.mark.parametrize(
    "route", [COMPLETIONS, CHATS, RESPONSES, MESSAGES], ids=["completions", "chats", "responses", "messages"]
)
async def test_pairs_of_fields_are_answered_equally_each_way(fleet, reference, route: Route):
    rows = route.rows(SEED, small=True)
    async with asking(reference.system.url) as one, asking(fleet.system.url) as other:
        assert problems(await ask_rows(route, rows, one, other)) == []


@pytest.mark.parametrize("route", [COMPLETIONS, CHATS], ids=["completions", "chats"])
async def test_pairs_without_an_answer_are_refused_each_way(fleet, reference, route: Route):
    async with asking(reference.system.url) as one, asking(fleet.system.url) as other:
        assert problems(await ask_refused(route, one, other)) == []
