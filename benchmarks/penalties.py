"""What penalties cost a step: tokens that were seen against the whole vocabulary.

    python benchmarks/penalties.py [--vocab 152064] [--rounds 25]

`apply` and `record` of `sampling.logits_processor` for a step of penalized rows, one thread, against the three formulas
over all logits of a row, as one would write them without knowing which tokens matter. Each round times both, so that a
noisy machine disturbs both alike; outputs must be equal to the last bit. Prints one JSON object per number of rows and
of tokens that each has seen.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tandem_engine.forward.logit_edits import Penalties
from tandem_engine.sampling.logits_processor import PenaltyRows

ROWS = (1, 16, 64)
SEEN = (100, 1_000, 10_000)
BLOCK_ROWS = 6
"""Rows that the plain formulas take at a time: about what a processor's caches hold of this vocabulary."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=152_064, help="size of the vocabulary (default 152064)")
    parser.add_argument("--rounds", type=int, default=25, help="times each step runs (default 25)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for rows in ROWS:
            for seen in SEEN:
                print(json.dumps(compare(rows, seen, args.vocab, args.rounds)), flush=True)


def compare(rows: int, seen: int, vocab: int, rounds: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rows * seen)
    histories = torch.randint(vocab, (rows, seen), generator=generator)
    logits = torch.randn(rows, vocab, generator=generator)
    penalties = _penalties(rows)
    table, counts = PenaltyRows(), torch.zeros(rows, vocab, dtype=torch.int32)
    counts.scatter_add_(1, histories, torch.ones_like(histories, dtype=torch.int32))
    for slot, history in enumerate(histories.tolist()):
        table.load(slot, (), history, vocab_size=vocab)
    sparse, dense = logits.clone(), logits.clone()
    table.apply(sparse, penalties)
    penalize_all(dense, penalties, counts)
    assert torch.equal(sparse, dense), f"{rows} rows of {seen} tokens differ"
    # No token is counted: a round leaves the history as it was.
    nothing = torch.full((rows, 1), -1)
    seconds = [
        (
            timed(lambda: table.apply(sparse, penalties)),
            timed(lambda: table.record(penalties.slots, nothing)),
            timed(lambda: penalize_all(dense, penalties, counts)),
        )
        for _ in range(rounds)
    ]
    return {
        "benchmark": "penalties",
        "rows": rows,
        "tokens_seen": seen,
        "vocab": vocab,
        "ms_per_row": round(statistics.median(apply + record for apply, record, _ in seconds) * 1e3 / rows, 4),
        "whole_vocabulary_ms_per_row": round(statistics.median(whole for *_, whole in seconds) * 1e3 / rows, 4),
        "ratio": round(statistics.median(whole / (apply + record) for apply, record, whole in seconds), 1),
    }


def penalize_all(logits: Tensor, penalties: Penalties, counts: Tensor) -> None:
    """The formulas over [rows, vocab], a few rows at a time."""
    for first in range(0, len(logits), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        rows, count = logits[block], counts[block]
        generated, strength = count > 0, penalties.repetition[block, None]
        rows = torch.where(generated, torch.where(rows > 0, rows / strength, rows * strength), rows)
        rows -= penalties.frequency[block, None] * count
        rows -= penalties.presence[block, None] * generated
        logits[block] = rows


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _penalties(rows: int) -> Penalties:
    return Penalties(
        index=torch.arange(rows),
        slots=torch.arange(rows),
        repetition=torch.full((rows,), 1.2),
        frequency=torch.full((rows,), 0.5),
        presence=torch.full((rows,), 0.25),
    )


if __name__ == "__main__":
    main()
