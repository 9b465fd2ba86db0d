"""Two releases that are too far apart, in one fleet: each serves with its own workers alone, and names the others."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem_engine.base import release
from tandem_testing.chaos.compare import compare_answers
from tandem_testing.chaos.streams import Answer, Ask, Load
from tandem_testing.metric_text import metric_sum
from tandem_testing.skew.fleet import MODEL, Member, MixedFleet
from tandem_testing.skew.releases import HERE, PACKAGES, Release, state_version
from tandem_testing.skew.rollout import REQUESTS


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


async def refusals(folder: Path, later: Release) -> dict[str, Any]:
    """What came of requests through a gateway of each release, and which problems there were."""
    async with MixedFleet.running(folder) as fleet:
        workers = [fleet.add_worker(each, "both") for each in (HERE, later)]
        gateways = [fleet.add_gateway(each) for each in (HERE, later)]
        await fleet.ready()
        expected: dict[Ask, Answer] = {}
        row: dict[str, Any] = {"case": "outside the window", "served": 0, "equal": 0, "problems": []}
        for number, (gateway, own, other) in enumerate(zip(gateways, workers, reversed(workers), strict=True)):
            before = await _requests(fleet, workers)
            answers = await _answers(gateway, f"outside-{number}")
            after = await _requests(fleet, workers)
            expected = expected or {answer.ask.unsalted: answer for answer in answers}
            row["served"] += len(answers)
            row["equal"] += sum(not compare_answers(expected[answer.ask.unsalted], answer) for answer in answers)
            if after[other.url] > before[other.url] or after[own.url] == before[own.url]:
                row["problems"].append(f"{gateway.part.name}: requests per worker {before} -> {after}")
            if f"worker {other.part.name}@" not in _refused(gateway):
                row["problems"].append(f"{gateway.part.name} does not name {other.part.name}")
        return row


async def _answers(gateway: Member, salt: str) -> Sequence[Answer]:
    async with Load(urls=[gateway.url], model=MODEL) as load:
        load.send([replace(ask, salt=salt) for ask in REQUESTS])
        return await load.gathered()


async def _requests(fleet: MixedFleet, workers: Sequence[Member]) -> dict[str, float]:
    texts = {each.url: (await fleet.http.get(f"{each.url}/metrics")).text for each in workers}
    return {url: metric_sum(text, "tandem_worker_requests_total") for url, text in texts.items()}


def _refused(gateway: Member) -> str:
    return "\n".join(line for line in gateway.part.said().splitlines() if "gets no requests" in line)
