"""`tandem pull --into` as the Job of a ModelCache runs it: a process that may be killed, and a hub that may fail."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tandem_services.cli.flags import bundled_model
from tandem_testing.hub_server import hub_server
from tandem_testing.waiting import wait_for

TOKEN = "hf_canary0123456789"
REPO = "org/mini"
WEIGHTS = "model-00001-of-00002.safetensors"
CLI = (sys.executable, "-m", "tandem_services.cli.main", "pull", REPO)


class Job:
    """The container: a read-only home, a volume, a file for its termination message."""

    def __init__(self, folder, url):
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "XDG_", "TANDEM_"))}
        self.environment = kept | {"HOME": str(folder), "HF_ENDPOINT": url, "HF_TOKEN": TOKEN}
        self.volume, self.result_file = folder / "volume", folder / "termination-log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self, *more):
        flags = ("--into", str(self.volume), "--result", str(self.result_file), "--progress-port", str(self.port))
        return subprocess.Popen(
            (*CLI, *flags, *more), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *more):
        """Status and result. What it prints never has the token."""
        self.result_file.unlink(missing_ok=True)
        with self.start(*more) as process:
            out, errors = process.communicate()
        assert TOKEN not in out + errors
        assert "Traceback" not in errors
        result = json.loads(self.result_file.read_text())
        assert self.result_file.stat().st_size < 4096
        return process.returncode, result

    def progress(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/progress", timeout=5) as response:
                return json.loads(response.read())
        except OSError:
            return {"done": 0, "total": 0}

    def partial(self, commit):
        path = self.volume / f".{commit}.part" / f"{WEIGHTS}.part"
        return path.stat().st_size if path.exists() else 0


@pytest.fixture
def hub():
    with hub_server() as hub:
        hub.add(REPO, bundled_model())
        yield hub


@pytest.fixture
def job(tmp_path, hub):
    return Job(tmp_path, hub.url)


def test_killed_download_is_resumed_by_the_next_pod(job, hub):
    repo = hub.repos[REPO]
    commit, size = repo.refs["main"], len(next(iter(repo.commits.values()))[WEIGHTS])
    repo.paced[WEIGHTS] = 0.05
    with job.start() as process:
        wait_for(lambda: job.partial(commit) > size // 8, timeout_s=60)
        seen = job.progress()
        process.send_signal(signal.SIGKILL)
    assert 0 < seen["done"] < seen["total"]
    assert (seen["file"], seen["rate"] > 0) == (WEIGHTS, True)
    kept = job.partial(commit)
    assert not (job.volume / commit).exists()
    repo.paced.clear()
    status, result = job.run()
    assert (status, result["commit"], len(result["fingerprint"])) == (0, commit, 64)
    assert (job.volume / commit / WEIGHTS).read_bytes() == (bundled_model() / WEIGHTS).read_bytes()
    assert hub.starts[WEIGHTS] == [0, kept], "no byte that has arrived is sent again"


def test_fetched_commit_is_found_without_a_hub(job):
    commit = job.run()[1]["commit"]
    first = (job.volume / commit / "tandem-commit.json").read_bytes()
    job.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    command = (*CLI[:-1], f"{REPO}@{commit}", "--into", str(job.volume))
    done = subprocess.run(command, env=job.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (job.volume / commit / "tandem-commit.json").read_bytes() == first


def test_each_failure_has_a_reason(job, hub):
    repo = hub.repos[REPO]
    repo.token = "another"
    assert job.run()[1]["reason"] == "HubAuthRefused"
    repo.token = ""
    repo.wrong[WEIGHTS] = 1000
    status, result = job.run()
    assert (status, result["reason"]) == (2, "ChecksumMismatch")
    repo.wrong.clear()
    status, result = job.run("--max-bytes", "1000000")
    assert (status, result["reason"], result["needed"] > 1_000_000) == (2, "NoSpace", True)
    repo.limited = 1
    assert job.run()[0] == 0, "a limit of requests is waited for"


def test_other_commits_are_pruned_but_those_that_are_kept(job, hub):
    repo = hub.repos[REPO]
    commits = [job.run()[1]["commit"]]
    for text in (b"1", b"2"):
        repo.commit(dict(repo.commits[commits[0]]) | {"notes.txt": text})
        commits.append(job.run()[1]["commit"])
    status, result = job.run("--prune", "--keep", commits[0])
    assert (status, result["removed"]) == (0, 1)
    assert sorted(path.name for path in job.volume.iterdir() if path.is_dir()) == sorted([commits[0], commits[2]])


def test_flags_of_a_volume_without_one_are_refused(job):
    for flags in (["--prune"], ["--into", str(job.volume), "--keep", "main", "--prune"]):
        done = subprocess.run((*CLI, *flags), env=job.environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("tandem: error: --")
