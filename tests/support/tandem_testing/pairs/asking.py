"""Asks each row of an array in every way, and says where the answers differ.

whole       alone, without a stream
streamed    alone
crowd       whole and streamed, with every other row at the same time
elsewhere   the same, of another system
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem_testing.pairs.answers import Answer, differences
from tandem_testing.pairs.covering import Row
from tandem_testing.pairs.fields import Route

PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One system that serves `model`."""

    http: httpx.AsyncClient
    model: str

    async def whole(self, route: Route, row: Row) -> Answer:
        return route.whole_form(await self._post(route, row, {}))

    async def streamed(self, route: Route, row: Row) -> Answer:
        return route.streamed_form(await self._post(route, row, route.streamed))

    async def crowd(self, route: Route, rows: Sequence[Row]) -> list[tuple[Answer, Answer]]:
        """The whole and the streamed answer of each row."""
        waiting = [asyncio.gather(self.whole(route, row), self.streamed(route, row)) for row in rows]
        return [(whole, streamed) for whole, streamed in await asyncio.gather(*waiting)]

    async def _post(self, route: Route, row: Row, more: dict[str, Any]) -> httpx.Response:
        return await self.http.post(route.path, json={"model": self.model, **route.body(row), **more})


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[Asked]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)) as http:
        models = (await http.get("/v1/models")).raise_for_status().json()
        yield Asked(http=http, model=models["data"][0]["id"])


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Of one row."""

    row: Row
    problems: list[str] = field(default_factory=list)

    def compare(self, way: str, expected: Answer, got: Answer) -> None:
        self.problems += [f"{way}: {each}" for each in differences(expected, got)]


async def ask_rows(route: Route, rows: Sequence[Row], one: Asked, other: Asked) -> list[Outcome]:
    """`one` is asked in every way; `other`, elsewhere."""
    outcomes = []
    crowds = await asyncio.gather(one.crowd(route, rows), other.crowd(route, rows))
    for row, here, there in zip(rows, *crowds, strict=True):
        outcome = Outcome(row=row)
        expected = await one.whole(route, row)
        if "error" in expected:
            outcome.problems.append(f"whole: {expected['error']}")
        outcome.compare("in a crowd", expected, here[0])
        outcome.compare("elsewhere", expected, there[0])
        for way, answer in (
            ("streamed", await one.streamed(route, row)),
            ("streamed in a crowd", here[1]),
            ("streamed elsewhere", there[1]),
        ):
            _compare_stream(route, outcome, way, expected, answer)
        outcomes.append(outcome)
    return outcomes


def _compare_stream(route: Route, outcome: Outcome, way: str, expected: Answer, got: Answer) -> None:
    params = route.not_streamed(outcome.row)
    if not params:
        outcome.compare(way, expected, got)
    elif not is_refused(got, params):
        outcome.problems.append(f"{way}: not refused for {' or '.join(sorted(params))} but {got}")


def is_refused(answer: Answer, params: Collection[str]) -> bool:
    """With a 400, or its event, that names one of the fields."""
    error = answer.get("error", {})
    return error.get("type") == "BadRequestError" and error["param"] in params


async def ask_refused(route: Route, one: Asked, other: Asked) -> list[Outcome]:
    """Pairs that no row has: each way answers with the same error."""
    outcomes = []
    for each in route.refused:
        row = dict((each.one, each.other))
        outcome = Outcome(row=row)
        expected = await one.whole(route, row)
        if not is_refused(expected, {each.param}):
            outcome.problems.append(f"whole: not refused for {each.param} but {expected}")
        outcome.compare("streamed", expected, await one.streamed(route, row))
        outcome.compare("elsewhere", expected, await other.whole(route, row))
        outcome.compare("streamed elsewhere", expected, await other.streamed(route, row))
        outcomes.append(outcome)
    return outcomes
