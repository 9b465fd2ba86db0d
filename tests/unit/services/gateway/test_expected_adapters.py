"""Requests of announced adapters wait for them; their places are shared between tenants."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem_engine.base.clock import MonotonicClock
from tandem_engine.messages.control import ServedAdapter
from tandem_services.common.errors import ApiError
from tandem_services.gateway.access.tenants import Tenant
from tandem_services.gateway.models.expected_adapters import ExpectedAdapters


@dataclass
class Names:
    """What names stand for, and which ones are announced."""

    found: dict[str, ServedAdapter] = field(default_factory=dict)
    announced_adapters: frozenset[str] = frozenset({"sql"})

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        return self

    def find(self, name: str) -> ServedAdapter | None:
        return self.found.get(name)


@dataclass
class Waits:
    """Requests that wait, and how many there were at each change."""

    names: Names
    expected: ExpectedAdapters
    lengths: list[int]

    def ask(self, tenant: Tenant) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self.expected.find("sql", tenant))

    async def asked(self, *tenants: Tenant) -> "list[asyncio.Task[Any]]":
        """In this order."""
        tasks = []
        for tenant in tenants:
            tasks.append(self.ask(tenant))
            await asyncio.sleep(0)
        return tasks


@pytest.fixture
def waits() -> Waits:
    """With four places."""
    names, lengths = Names(), []
    expected = ExpectedAdapters(model=names, clock=MonotonicClock(), changed=lengths.append, wait_s=60.0, seats=4)
    return Waits(names, expected, lengths)


def tenant(name: str, **facts: Any) -> Tenant:
    return Tenant(name=name, sha256=(), **facts)


ANN, BOB = tenant("ann"), tenant("bob")


async def refusals(tasks: "list[asyncio.Task[Any]]") -> list[int | None]:
    """Status of each that has ended, None of those that wait, a moment later."""
    done, _ = await asyncio.wait(tasks, timeout=0.05)
    found = []
    for task in tasks:
        error = task.exception() if task in done else None
        assert error is None or isinstance(error, ApiError)
        found.append(None if error is None else error.status)
    return found


async def end(waits: Waits, *tasks: "asyncio.Task[Any]") -> None:
    """All that wait are served."""
    waits.names.found["sql"] = ServedAdapter(name="sql", digest="7" * 32, rank=4, root="r")
    for ref in await asyncio.gather(*tasks):
        assert ref.digest == bytes.fromhex("7" * 32)


async def test_tenant_with_fewer_places_displaces_the_last_of_another(waits: Waits) -> None:
    floods = await waits.asked(ANN, ANN, ANN, ANN)
    others = await waits.asked(BOB, BOB)
    assert await refusals([*floods, *others]) == [None, None, 503, 503, None, None]
    assert waits.lengths[-1] == 4
    await end(waits, *floods[:2], *others)
    assert waits.lengths[-1] == 0


async def test_tenant_with_most_places_displaces_no_request(waits: Waits) -> None:
    tasks = await waits.asked(ANN, ANN, ANN, BOB)
    (refused,) = await waits.asked(ANN)
    assert await refusals([*tasks, refused]) == [None, None, None, None, 503]
    await end(waits, *tasks)


async def test_places_are_shared_by_weight(waits: Waits) -> None:
    heavy = tenant("heavy", weight=3.0)
    tasks = await waits.asked(heavy, heavy, heavy, BOB)
    (refused,) = await waits.asked(BOB)
    assert await refusals([*tasks, refused]) == [None, None, None, None, 503]
    await end(waits, *tasks)


async def test_request_whose_client_leaves_frees_its_place(waits: Waits) -> None:
    tasks = await waits.asked(ANN, ANN, ANN, ANN)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    (later,) = await waits.asked(ANN)
    assert await refusals([*tasks[1:], later]) == [None] * 4
    await end(waits, *tasks[1:], later)
