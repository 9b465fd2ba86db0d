"""How long an event loop stands still while a thread beside it loads a tokenizer.

    python benchmarks/tokenizer_stall.py [--vocabulary 200000] [--rounds 3]

The tokenizer is a random byte-level BPE of this size, written as checkpoints have it. A task sleeps for 2 ms again and
again while `TextTokenizer.load` runs in a thread; the longest time between two of its turns is the stall. `parse` is
one call of the library with the same file, which holds the GIL: no stall can be shorter.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "engine")]

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

from tandem_engine.tokenizer.text_tokenizer import TextTokenizer  # noqa: E402


def write_tokenizer(folder: Path, size: int) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary, merges = {character: number for number, character in enumerate(alphabet)}, []
    known, draw = [each for each in alphabet if each.isalpha()], random.Random(1)
    while len(vocabulary) < size:
        pair = [draw.choice(known), draw.choice(known)]
        token = "".join(pair)
        if len(token) <= 12 and token not in vocabulary:
            vocabulary[token] = len(vocabulary)
            merges.append(pair)
            known.append(token)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"id": size, "content": "<|end|>", "special": True, **flags}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document, indent=2, ensure_ascii=False), "utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": size}), "utf-8")


async def stall_of(work: Callable[[], object]) -> tuple[float, float, float]:
    """Longest stall, duration and CPU time, in seconds."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.002)
            longest = max(longest, time.perf_counter() - before - 0.002)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    longest, began, cpu = 0.0, time.perf_counter(), time.process_time()
    await asyncio.to_thread(work)
    took = time.perf_counter() - began
    await asyncio.sleep(0.01)
    ticking.cancel()
    return longest, took, time.process_time() - cpu


async def run(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    data = (folder / "tokenizer.json").read_bytes()
    found: dict[str, list[tuple[float, float, float]]] = {"load": [], "parse": []}
    for _ in range(rounds):
        found["load"].append(await stall_of(lambda: TextTokenizer.load(folder)))
        found["parse"].append(await stall_of(lambda: Tokenizer.from_buffer(data)))
    names = ("stall_s", "took_s", "cpu_s")
    return {
        name: {what: round(min(row[place] for row in rows), 3) for place, what in enumerate(names)}
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=200_000, help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the least disturbed counts (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, args.vocabulary)
        mib = (folder / "tokenizer.json").stat().st_size / 2**20
        print(json.dumps({"file_mib": round(mib, 1), **asyncio.run(run(folder, args.rounds))}, indent=2))


if __name__ == "__main__":
    main()
