"""Prompts as token ids and forced output lengths: a function of the workload and the round.

Lengths are those of the workload, the same in every round; ids are new in every round, so that no cache answers what it
was asked before. No weights are needed to know that they mean nothing: speed does not depend on what ids say.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

VOCABULARY = 16_384
FIRST_ID = 3
"""Those below are special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prompt and exactly how many tokens to generate after it."""

    prompt: tuple[int, ...]
    output_len: int


def ids(seed: str, count: int) -> tuple[int, ...]:
    """`count` token ids, none of them special."""
    rng = random.Random(seed)
    return tuple(rng.randrange(FIRST_ID, VOCABULARY) for _ in range(count))


def lengths(seed: str, count: int, low: int, high: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def mixed(name: str, number: int, *, count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Job]:
    """`count` jobs with lengths drawn evenly from the two ranges, ends included."""
    prompts = lengths(f"{name} prompts", count, *prompt)
    outputs = lengths(f"{name} outputs", count, *output)
    return [
        Job(prompt=ids(f"{name} {number} {each}", length), output_len=out)
        for each, (length, out) in enumerate(zip(prompts, outputs, strict=True))
    ]


def shared_prefix(number: int, *, count: int, prefix: int, own: int, output: int) -> list[Job]:
    """Jobs whose first `prefix` tokens are the same."""
    common = ids(f"shared {number}", prefix)
    return [Job(prompt=common + ids(f"shared {number} {each}", own), output_len=output) for each in range(count)]


def next_turns(number: int, turn: int, histories: Sequence[tuple[int, ...]], *, output: int) -> list[Job]:
    """The next turn of every conversation: its whole history, and 48 to 96 new tokens."""
    sizes = lengths(f"turn {turn}", len(histories), 48, 96)
    return [
        Job(prompt=history + ids(f"conversation {number} {turn} {each}", length), output_len=output)
        for each, (history, length) in enumerate(zip(histories, sizes, strict=True))
    ]
