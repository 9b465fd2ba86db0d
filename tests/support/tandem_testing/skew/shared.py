"""One gateway in front of two services, as a ModelGateway's: the services, and the gateways, are of two releases.

    1  chat on workers of the old release, search on those of the new one, through a gateway of the new release
    2  the same, and a gateway of the old release beside it
    3  chat is rolled: its old workers drain while streams of both services speak
    4  both on workers of the new release

Every answer is compared with that of the first service in the first stage: both serve one model under two names.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem_testing.chaos.compare import compare_answers
from tandem_testing.chaos.streams import Answer, Ask, Load
from tandem_testing.skew.fleet import Member, MixedFleet
from tandem_testing.skew.releases import Release
from tandem_testing.skew.rollout import REQUESTS, SPEAK_TIMEOUT_S
from tandem_testing.waiting import until

SERVICES = ("chat", "search")
ROLES = ("prefill", "decode")


@dataclass(kw_only=True, slots=True)
class SharedGateway:
    """The fleet, and what its first answers were."""

    fleet: MixedFleet
    problems: list[str] = field(default_factory=list)
    _expected: dict[Ask, Answer] = field(default_factory=dict)
    _stages: int = 0

    async def stage(self, name: str, change: Callable[[], Awaitable[None]] | None = None) -> None:
        """The same requests to each service, half of them through each gateway; `change` while they speak."""
        self._stages += 1
        urls = [each.url for each in self.fleet.of("gateway")]
        async with AsyncExitStack() as stack:
            loads = {model: await stack.enter_async_context(Load(urls=urls, model=model)) for model in SERVICES}
            for model, load in loads.items():
                load.send([replace(ask, salt=f"shared-{self._stages}-{model}") for ask in REQUESTS])
            if change is not None:
                await until(lambda: all(map(_speaks, loads.values())), SPEAK_TIMEOUT_S, "both services stream")
                await change()
            for model, load in loads.items():
                self._judge(f"{name}, {model}", await load.gathered())

    def _judge(self, place: str, answers: Sequence[Answer]) -> None:
        if not self._expected:
            self._expected = {answer.ask.unsalted: answer for answer in answers if answer.error is None}
        for answer in answers:
            expected = self._expected.get(answer.ask.unsalted)
            damage = "no answer to compare with" if expected is None else compare_answers(expected, answer)
            if damage:
                self.problems.append(f"{place}, {answer.ask.kind.value}: {answer.error or damage}")


async def shared_problems(old: Release, new: Release, folder: Path) -> list[str]:
    """Of all stages; empty where every answer is as expected. Logs stay in `folder`."""
    async with MixedFleet.running(folder) as fleet:
        shared = SharedGateway(fleet=fleet)
        former = [fleet.add_worker(old, role, model="chat", cluster="chat") for role in ROLES]
        for role in ROLES:
            fleet.add_worker(new, role, model="search", cluster="search")
        fleet.add_shared_gateway(new, SERVICES, "--independent-models")
        await fleet.ready()
        await shared.stage("gateway of the new release")
        fleet.add_shared_gateway(old, SERVICES)
        await fleet.ready()
        await shared.stage("gateways of both releases")
        for role in ROLES:
            fleet.add_worker(new, role, model="chat", cluster="chat")
        await fleet.ready()
        await shared.stage("chat is rolled", lambda: _retire(fleet, former))
        await shared.stage("workers of the new release")
        return shared.problems


def _speaks(load: Load) -> bool:
    return load.begun >= len(REQUESTS) - 4 or load.finished


async def _retire(fleet: MixedFleet, members: Sequence[Member]) -> None:
    await asyncio.gather(*(fleet.retire(each) for each in members))
