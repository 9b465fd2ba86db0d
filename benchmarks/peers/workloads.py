"""What is timed, and which figures come of it.

Each is played on one engine and gives figures and the tokens of every job, so that engines can be compared for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from peers.engines.base import Result
from peers.jobs import Job, mixed, next_turns, shared_prefix

Run = Callable[[Sequence[Job]], Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A kind of figure."""

    unit: str
    higher_is_better: bool

    def speed(self, ours: float, theirs: float) -> float:
        """How many times faster ours is."""
        return ours / theirs if self.higher_is_better else theirs / ours


FIGURES = {
    "offline": Figure(unit="output tokens/s", higher_is_better=True),
    "tpot_ms": Figure(unit="ms per token", higher_is_better=False),
    "ttft_ms": Figure(unit="ms to the first token of 128", higher_is_better=False),
    "prefill": Figure(unit="prompt tokens/s", higher_is_better=True),
    "shared": Figure(unit="s for 32 requests", higher_is_better=False),
    "conversations": Figure(unit="s for 8 × 4 turns", higher_is_better=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    figures: dict[str, float]
    outputs: tuple[tuple[int, ...], ...]
    """Empty where the engine does not tell tokens."""


class Workload(Protocol):
    name: str

    def play(self, run: Run, number: int) -> Played:
        """Round `number`: every round has prompts of its own."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Offline:
    """All requests at once."""

    count: int = 64
    name: str = "offline"

    def jobs(self, number: int) -> list[Job]:
        return mixed("offline", number, count=self.count, prompt=(64, 512), output=(64, 128))

    def play(self, run: Run, number: int) -> Played:
        jobs = self.jobs(number)
        result = run(jobs)
        tokens = sum(job.output_len for job in jobs)
        return Played(figures={"offline": tokens / result.seconds}, outputs=result.outputs or ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One stream, and one token alone: what is left is the time of the other tokens."""

    output: int = 128
    name: str = "single"

    def play(self, run: Run, number: int) -> Played:
        whole = run(mixed("single", number, count=1, prompt=(128, 128), output=(self.output, self.output)))
        first = run(mixed("first", number, count=1, prompt=(128, 128), output=(1, 1)))
        tpot = (whole.seconds - first.seconds) / (self.output - 1)
        return Played(figures={"tpot_ms": tpot * 1e3, "ttft_ms": first.seconds * 1e3}, outputs=whole.outputs or ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """A prompt of 2,048 tokens and one token."""

    length: int = 2048
    name: str = "prefill"

    def jobs(self, number: int) -> list[Job]:
        return mixed("prefill", number, count=1, prompt=(self.length, self.length), output=(1, 1))

    def play(self, run: Run, number: int) -> Played:
        result = run(self.jobs(number))
        return Played(figures={"prefill": self.length / result.seconds}, outputs=result.outputs or ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Requests that come at once and share most of their prompts, which is not cached."""

    count: int = 32
    name: str = "shared"

    def play(self, run: Run, number: int) -> Played:
        result = run(shared_prefix(number, count=self.count, prefix=1024, own=64, output=32))
        return Played(figures={"shared": result.seconds}, outputs=result.outputs or ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversations:
    """Several at once, each turn with all turns before it."""

    count: int = 8
    turns: int = 4
    name: str = "conversations"

    def play(self, run: Run, number: int) -> Played:
        histories: list[tuple[int, ...]] = [()] * self.count
        seconds = 0.0
        for turn in range(self.turns):
            jobs = next_turns(number, turn, histories, output=32)
            result = run(jobs)
            seconds += result.seconds
            # A server that tells no tokens is asked with as many others.
            answers = result.outputs or tuple(job.prompt[-job.output_len :] for job in jobs)
            histories = [job.prompt + answer for job, answer in zip(jobs, answers, strict=True)]
        return Played(figures={"conversations": seconds}, outputs=tuple(histories) if result.outputs else ())


WORKLOADS: dict[str, Workload] = {
    each.name: each for each in (Offline(), Single(), Prefill(), Shared(), Conversations())
}


def warm_up(run: Run, *, batch: bool) -> None:
    """What an engine does once per shape it has done before it is timed."""
    run(mixed("warm-up prompt", 0, count=1, prompt=(2048, 2048), output=(2, 2)))
    run(mixed("warm-up stream", 0, count=1, prompt=(128, 128), output=(16, 16)))
    if batch:
        run(mixed("warm-up batch", 0, count=16, prompt=(64, 512), output=(8, 16)))
