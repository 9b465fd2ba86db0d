"""Offline workloads: token ids and forced output lengths, a function of the seed."""

import random
from dataclasses import dataclass

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
