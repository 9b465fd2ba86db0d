"""transformers `generate` on the same jobs: one left-padded batch run to its longest output.

It runs in a separate process: two libraries that compute in one process keep two OpenMP teams, and once those outnumber
the cores both get slower. Jobs and tokens are exchanged as lines of JSON.
"""

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from tandem_engine.base.errors import EngineError
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prompt and exactly how many tokens to generate after it."""

    prompt: tuple[int, ...]
    output_len: int

    def request(self, rid: str) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=self.output_len, temperature=0.0, ignore_eos=True)
        return GenerateRequest(rid=rid, input_ids=self.prompt, sampling=sampling)


def mixed_jobs(count: int, *, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[Job]:
    """Prompts of input_len/8 to input_len tokens, outputs of output_len/2 to output_len."""
    rng = random.Random(seed)
    return [
        Job(
            prompt=random_ids(rng, rng.randint(max(1, input_len // 8), input_len), vocab_size),
            output_len=rng.randint(max(1, output_len // 2), output_len),
        )
        for _ in range(count)
    ]


def single_job(*, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[Job]:
    """One stream."""
    return [Job(prompt=random_ids(random.Random(seed), input_len, vocab_size), output_len=output_len)]


def random_ids(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: what to load."""

    model_path: str
    dtype: str
    threads: int


class TransformersBaseline:
    """`AutoModelForCausalLM` with its default (SDPA) attention, in a child process. Close it."""

    def __init__(self, start: Start) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem_lab.bench.transformers_peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._send(start)
        self._receive(bool)

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        """Each job's tokens, in order. Raises `EngineError` when the process has died."""
        self._send([(job.prompt, job.output_len) for job in jobs])
        outputs: list[tuple[int, ...]] = self._receive(list[tuple[int, ...]])
        return outputs

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None, "opened with a pipe"
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        self._process.stdin.flush()

    def _receive(self, kind: Any) -> Any:
        assert self._process.stdout is not None, "opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"the transformers process ended with status {self._process.wait()}")
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        assert self._process.stdin is not None, "opened with a pipe"
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """The child process."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    model = _load(start)
    _reply(True)
    for line in sys.stdin.buffer:
        jobs = msgspec.json.decode(line, type=list[tuple[tuple[int, ...], int]])
        _reply(_generate(model, [Job(prompt=prompt, output_len=length) for prompt, length in jobs]))


def _reply(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _load(start: Start) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(start.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, start.dtype)
    model = AutoModelForCausalLM.from_pretrained(start.model_path, dtype=dtype, local_files_only=True).eval()
    # Output lengths are forced, so that both sides do the same work.
    model.generation_config.eos_token_id = None
    return model


def _generate(model: Any, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    import torch

    width = max(len(job.prompt) for job in jobs)
    longest = max(job.output_len for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
    return [tuple(row[width : width + job.output_len].tolist()) for row, job in zip(out, jobs, strict=True)]


if __name__ == "__main__":
    main()
