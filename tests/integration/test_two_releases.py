"""Code of older releases, taken from git, and what this one sends to it. `make skew` runs whole fleets of both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_testing.skew import read_samples
from tandem_testing.skew.__main__ import COMMITS
from tandem_testing.skew.releases import Release, missing_commits, take
from tandem_testing.wire_samples import encoded_samples


@pytest.fixture(params=COMMITS)
def release(request, tmp_path) -> Release:
    if missing_commits([request.param]):
        pytest.skip(f"this clone has no commit {request.param}: git fetch --unshallow")
    return take(request.param, tmp_path)


def test_older_release_reads_messages_of_this_one(release):
    samples = {name: data.hex() for name, data in encoded_samples().items()}
    answer = subprocess.run(
        [sys.executable, str(Path(read_samples.__file__))],
        input=json.dumps(samples),
        env=os.environ | {"PYTHONPATH": release.python_path},
        cwd=release.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    read: dict[str, str] = json.loads(answer.stdout)
    assert {name: problem for name, problem in read.items() if problem} == {}
    assert {"GenerateRequest", "OutputBatch", "Hello", "WriteGrant", "HandoffRecord", "SessionBinding"} <= read.keys()
