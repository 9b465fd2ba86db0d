"""What an engine is to the one that measures: a tree of processes that turns jobs into tokens."""

import json
import select
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peers.jobs import Job
from peers.processes import PeerError, pause, resume, start, stop, tail
from peers.streams import complete_all
from peers.time_limit import Deadline

BENCHMARKS = Path(__file__).resolve().parents[2]
ROOT = BENCHMARKS.parent
START_S = 150.0
CONTEXT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all engines of a comparison have in common."""

    checkpoint: Path
    dtype: str
    """"float32" or "bfloat16"."""
    threads: int
    kv_gib: float
    home: Path
    """Where peers are installed (`peers.home`)."""
    logs: Path
    streams: int
    """Requests that an engine may run at once."""
    deadline: Deadline
    """Bounds every wait for an engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    seconds: float
    outputs: tuple[tuple[int, ...], ...] | None
    """Tokens of each job; None from a server that tells only how many there were."""


class Engine(Protocol):
    """Close it. Between `pause` and `resume` it gets no CPU."""

    name: str

    @property
    def pids(self) -> list[int]:
        """The roots of its processes."""
        ...

    def run(self, jobs: Sequence[Job]) -> Result:
        """All jobs at once. Raises `PeerError` for an answer of another length than asked for."""
        ...

    def facts(self) -> dict[str, Any]:
        """Versions and the like."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class LineEngine:
    """An engine as a library, in a process that is asked in lines."""

    def __init__(
        self,
        name: str,
        side: str,
        setting: Setting,
        *,
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.name = name
        self._log = setting.logs / f"{name}.log"
        self._deadline = setting.deadline
        argv = [str(python), "-m", f"peers.sides.{side}"]
        self._process = start(argv, log=self._log, environment={**python_path(), **(environment or {})}, pipes=True)
        message = {
            "model": str(setting.checkpoint),
            "dtype": setting.dtype,
            "threads": setting.threads,
            "context": CONTEXT,
            "streams": setting.streams,
            "kv_gib": setting.kv_gib,
        }
        try:
            self._facts: dict[str, Any] = self._ask({**message, **more}, START_S)["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [self._process.pid]

    def run(self, jobs: Sequence[Job]) -> Result:
        answer = self._ask([[job.prompt, job.output_len] for job in jobs])
        outputs = tuple(tuple(each) for each in answer["outputs"])
        require_lengths(self.name, jobs, [len(each) for each in outputs])
        return Result(seconds=answer["seconds"], outputs=outputs)

    def facts(self) -> dict[str, Any]:
        self._facts = self._ask("facts")
        return self._facts

    def pause(self) -> None:
        pause(self._process)

    def resume(self) -> None:
        resume(self._process)

    def close(self) -> None:
        stop(self._process)

    def _ask(self, message: object, most_s: float | None = None) -> Any:
        limit_s = self._deadline.wait_s(most_s)
        assert self._process.stdin is not None, "opened with a pipe"
        assert self._process.stdout is not None, "opened with a pipe"
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} has ended:\n{tail(self._log)}") from None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise PeerError(f"{self.name} did not answer within {limit_s:.0f} s:\n{tail(self._log)}")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} ended with status {self._process.wait()}:\n{tail(self._log)}")
        return json.loads(line)


class ServerEngine:
    """An engine behind an OpenAI-compatible server. Its first process is stopped last."""

    pausable = True

    def __init__(self, name: str, setting: Setting, *, model: str, port: int) -> None:
        self.name, self.model, self.port = name, model, port
        self.deadline = setting.deadline
        self._logs = setting.logs
        self._processes: list[Any] = []

    def begin(self, argv: Sequence[str], environment: Mapping[str, str] | None = None, *, part: str = "") -> None:
        """Start a process of this engine."""
        log = self._logs / f"{self.name}{part}.log"
        self._processes.append(start(argv, log=log, environment=environment))

    def wait_until_ready(self, path: str = "/health", port: int | None = None) -> None:
        """Raises `PeerError` when it has ended or does not become ready."""
        limit_s = self.deadline.wait_s(START_S)
        deadline = time.monotonic() + limit_s
        while not answers(f"http://127.0.0.1:{port or self.port}{path}"):
            for process in self._processes:
                if process.poll() is not None:
                    raise PeerError(f"{self.name} ended with status {process.poll()}; its logs are in {self._logs}")
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} was not ready after {limit_s:.0f} s; its logs are in {self._logs}")
            time.sleep(0.2)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, jobs: Sequence[Job]) -> Result:
        seconds, streams = complete_all(self.port, self.model, jobs, limit_s=self.deadline.wait_s())
        require_lengths(self.name, jobs, [stream.tokens for stream in streams])
        return Result(seconds=seconds, outputs=None)

    def facts(self) -> dict[str, Any]:
        return {}

    def pause(self) -> None:
        for process in self._processes if self.pausable else []:
            pause(process)

    def resume(self) -> None:
        for process in self._processes if self.pausable else []:
            resume(process)

    def close(self) -> None:
        for process in reversed(self._processes):
            stop(process)


Start = Callable[[Setting], Engine]


def python_path() -> dict[str, str]:
    """So that a Python finds `peers` and, where it needs it, Tandem."""
    return {"PYTHONPATH": ":".join(str(path) for path in (BENCHMARKS, ROOT / "engine", ROOT / "services"))}


def require_lengths(name: str, jobs: Sequence[Job], lengths: Sequence[int]) -> None:
    wrong = [
        f"job {number}: {length} tokens instead of {job.output_len}"
        for number, (job, length) in enumerate(zip(jobs, lengths, strict=True))
        if length != job.output_len
    ]
    if wrong:
        raise PeerError(f"{name} answered {len(wrong)} of {len(jobs)} jobs with another length: {'; '.join(wrong[:3])}")


def answers(url: str) -> bool:
    """Whether a GET is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(200 <= answer.status < 300)
    except (urllib.error.URLError, OSError, TimeoutError):
        return False
