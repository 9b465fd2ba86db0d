"""Code of older releases, taken from git, and what this one shares with it. `make skew` runs whole fleets of both."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem_services.router.decision import Source
from tandem_testing.redis_server import RedisServer
from tandem_testing.router_builders import LASTING, Fleet, chain_of, make_query, make_record, patient_router
from tandem_testing.skew import read_samples, share_redis
from tandem_testing.skew.__main__ import COMMITS
from tandem_testing.skew.releases import Release, missing_commits, take
from tandem_testing.skew.share_redis import PROMPT
from tandem_testing.wire_samples import encoded_samples


@pytest.fixture(params=COMMITS)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Release:
    if missing_commits([request.param]):
        pytest.skip(f"this clone has no commit {request.param}: git fetch --unshallow")
    return take(request.param, tmp_path)


@pytest.fixture
async def fleet(server: RedisServer) -> AsyncIterator[Fleet]:
    async with Fleet.of(server, **LASTING) as workers:
        yield workers


def run(release: Release, script: ModuleType, *args: str, given: str = "") -> dict[str, Any]:
    """What `script` prints when `release` runs it."""
    assert script.__file__ is not None
    answer = subprocess.run(
        [sys.executable, script.__file__, *args],
        input=given,
        env=os.environ | {"PYTHONPATH": release.python_path},
        cwd=release.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    printed: dict[str, Any] = json.loads(answer.stdout)
    return printed


def test_machine_without_git_has_no_older_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert missing_commits(COMMITS) == [*COMMITS]


def test_older_release_reads_messages_of_this_one(release: Release) -> None:
    samples = {name: data.hex() for name, data in encoded_samples().items()}
    read = run(release, read_samples, given=json.dumps(samples))
    assert {name: problem for name, problem in read.items() if problem} == {}
    assert {"GenerateRequest", "OutputBatch", "Hello", "WriteGrant", "HandoffRecord", "SessionBinding"} <= read.keys()


async def test_routers_of_two_releases_share_a_redis(release: Release, fleet: Fleet, server: RedisServer) -> None:
    new = make_record("new")
    await fleet.beat(new)
    await fleet.cache(new, chain_of(PROMPT))
    known = ["new@1", "old@1"]
    shared = run(release, share_redis, server.url)
    assert shared == {"known": known, "chosen": "new@1", "source": "redis", "matched": len(PROMPT)}
    router = patient_router(server)
    await router.start()
    try:
        assert sorted(worker.incarnation for worker in router.workers()) == known
        choice = await router.choose(make_query(PROMPT, exclude=frozenset({"new@1"})))
        assert (choice.decode.incarnation, choice.source) == ("old@1", Source.REDIS)
    finally:
        await router.stop()
