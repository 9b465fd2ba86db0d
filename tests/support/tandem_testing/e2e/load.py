"""Clients of a service while something happens to it: each takes the next request as soon as its last one ends.

    warm_up (one answer per prompt, one at a time) ─▶ with Load(…): things happen ─▶ summary

Every stream is checked for its shape and, token for token, against the answer from before. Nothing is tried again: a
request that fails counts.
"""

import asyncio
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx

from tandem_lab.bench.load import (
    Lengths,
    Measurement,
    Prompt,
    RequestSpec,
    Summary,
    Target,
    fixed_workload,
    reference_texts,
    summarize,
)
from tandem_testing.waiting import wait_for

TIMEOUT = httpx.Timeout(120.0, connect=10.0)
MORE_S = 240.0
LENGTHS = Lengths(prompt=60, output=48, spread=0.5)
PROMPTS = 12


def requests() -> list[RequestSpec]:
    """What is asked, over and over."""
    return fixed_workload(LENGTHS, PROMPTS, rate=None, seed=7)


def warm_up(url: str, model: str, specs: Sequence[RequestSpec]) -> dict[Prompt, str]:
    """The right answers. Raises `RemoteError` when one is none."""

    async def ask() -> dict[Prompt, str]:
        async with _client(url) as client:
            return await reference_texts(_target(client, model), specs, lambda _: None)

    return asyncio.run(ask())


class Load:
    """A context: clients ask from its beginning to its end, in a thread; then all streams are finished."""

    def __init__(self, url: str, model: str, references: dict[Prompt, str], *, clients: int) -> None:
        self._url, self._model, self._references, self._clients = url, model, references, clients
        self._measurements: list[Measurement] = []
        self._under_way = 0
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def answered(self) -> int:
        """Requests that have ended so far."""
        return len(self._measurements)

    @property
    def under_way(self) -> int:
        """Requests that are sent and have not ended."""
        return self._under_way

    def stop(self) -> None:
        """No client sends another request. Those under way continue."""
        self._ended.set()

    def summary(self) -> Summary:
        """Of what was measured, once the context has ended."""
        assert not self._thread.is_alive(), "the load still runs"
        seconds = max(one.ended or 0.0 for one in self._measurements) - min(one.began for one in self._measurements)
        return summarize(self._measurements, seconds, slo=None, references=self._references)

    def _run(self) -> None:
        try:
            asyncio.run(self._ask())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that owns the context
            self._failure = error

    async def _ask(self) -> None:
        specs = requests()
        async with _client(self._url) as client, asyncio.TaskGroup() as group:
            target = _target(client, self._model)
            for number in range(self._clients):
                group.create_task(self._one(target, specs, number))

    async def _one(self, target: Target, specs: Sequence[RequestSpec], turn: int) -> None:
        while not self._ended.is_set():
            self._under_way += 1
            self._measurements.append(await target.send(specs[turn % len(specs)]))
            self._under_way -= 1
            turn += self._clients


def more(load: Load, count: int) -> None:
    """Wait until so many further requests have ended."""
    wanted = load.answered + count
    wait_for(lambda: load.answered >= wanted, MORE_S, lambda: f"{load.answered} of {wanted} requests have ended")


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT)


def _target(client: httpx.AsyncClient, model: str) -> Target:
    return Target(client=client, model=model, temperature=0.0, seed=None, ignore_eos=True)
