"""Two releases that are too far apart, in one fleet: each serves with its own workers alone, and names the others."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem_engine.base import release
from tandem_testing.chaos.compare import compare_answers
from tandem_testing.chaos.streams import Answer, Ask, Load
from tandem_testing.metric_text import metric_sum
from tandem_testing.skew.fleet import MODEL, Member, MixedFleet
from tandem_testing.skew.releases import HERE, PACKAGES, Release, state_version
from tandem_testing.skew.rollout import REQUESTS
from tandem_testing.waiting import until

REPORTED_S = 60.0


def later_release(below: Path) -> Release:
    """The working tree as the first release outside the window of this one."""
    number, folder = release.RELEASE + release.WINDOW + 1, below / "later"
    for name in (*PACKAGES, "pyproject.toml"):
        copy = shutil.copytree if (HERE.folder / name).is_dir() else shutil.copy
        folder.mkdir(parents=True, exist_ok=True)
        copy(HERE.folder / name, folder / name)
    source = folder / Path(release.__file__).relative_to(HERE.folder)
    stated = f"\nRELEASE = {release.RELEASE}\n"
    text = source.read_text("utf-8")
    assert stated in text, f"{source} states no release"
    source.write_text(text.replace(stated, f"\nRELEASE = {number}\n"), "utf-8")
    state_version(folder)
    return Release(name="later", folder=folder)


async def refusals(folder: Path, later: Release) -> list[str]:
    """Problems of requests through a gateway of each release, which has to serve them with its own worker."""
    async with MixedFleet.running(folder) as fleet:
        workers = [fleet.add_worker(each, "both") for each in (HERE, later)]
        gateways = [fleet.add_gateway(each) for each in (HERE, later)]
        await fleet.ready()
        expected, problems = dict[Ask, Answer](), list[str]()
        for number, (gateway, other) in enumerate(zip(gateways, reversed(workers), strict=True)):
            answers = await _answers(gateway, f"outside-{number}")
            expected = expected or {answer.ask.unsalted: answer for answer in answers}
            damages = [(answer.ask, compare_answers(expected[answer.ask.unsalted], answer)) for answer in answers]
            problems += [f"{gateway.part.name}, {ask.kind.value}: {damage}" for ask, damage in damages if damage]
            if f"worker {other.part.name}@" not in _refused(gateway):
                problems.append(f"{gateway.part.name} does not name {other.part.name}")
        choices = sum(len(answer.choices) for answer in expected.values())
        return problems + await _misplaced(fleet, workers, choices)


async def _answers(gateway: Member, salt: str) -> Sequence[Answer]:
    async with Load(urls=[gateway.url], model=MODEL) as load:
        load.send([replace(ask, salt=salt) for ask in REQUESTS])
        return await load.gathered()


async def _misplaced(fleet: MixedFleet, workers: Sequence[Member], choices: int) -> list[str]:
    """What contradicts that each worker has computed the choices of one gateway. Workers report twice a second."""
    counts: dict[str, float] = {}

    async def counted() -> bool:
        for each in workers:
            text = (await fleet.http.get(f"{each.url}/metrics")).text
            counts[each.part.name] = metric_sum(text, "tandem_worker_requests_total")
        return sum(counts.values()) >= choices * len(workers)

    await until(counted, REPORTED_S, "all requests are counted", counts.copy)
    return [
        f"{name} has computed {count:g} choices, not {choices}" for name, count in counts.items() if count != choices
    ]


def _refused(gateway: Member) -> str:
    return "\n".join(line for line in gateway.part.log_text().splitlines() if "gets no requests" in line)
