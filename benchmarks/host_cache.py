"""What it saves to bring KV back from host memory or files instead of computing it again.

    python benchmarks/host_cache.py [--model models/tandem-mini] [--rounds 7] [--threads 1] [--storage-dir DIR]

Copy: pages per second and GB/s between the KV pool and host memory where forwards run, beside the tokens per
second of a prefill. `recompute_over_swap` is the predicted time to compute a page's tokens over that to copy it out
and back: above 1 a retracted request is swapped.

TTFT: time to the first token of a prompt of 1,000 cached tokens and 16 new ones, by where the prefix is, cold
included; `over_device` is the ratio to the device's. Median of the rounds, all kinds in every round. For `files` it
includes that a request arrives, waits for its blocks to be read and verified, and is admitted; the files were
written moments before, so a read is one from the page cache.

Prints one JSON object per line.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from tempfile import TemporaryDirectory

from tandem_engine.config import CacheConfig, EngineConfig, HostConfig, SchedulerConfig, WritePolicy
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.memory.page_copies import CopyKind, PageCopy
from tandem_lab.bench.transformers_peer import Job, random_ids

PREFIX, SUFFIX = 1000, 16
PAGES = 512
BATCH = 64
"""Pages of one copy."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tandem-mini", help="checkpoint (default the bundled one)")
    parser.add_argument("--rounds", type=int, default=7, help="times each prompt is timed (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a forward (default 1)")
    parser.add_argument("--storage-dir", help="where the files go (default a temporary directory)")
    args = parser.parse_args()
    config = EngineConfig(
        model_path=args.model,
        dtype="float32",
        threads=args.threads,
        scheduler=SchedulerConfig(context_length=2048),
        cache=CacheConfig(num_pages=PAGES),
    )
    loaded = load(config, progress=False)
    with TemporaryDirectory(dir=args.storage_dir, prefix="tandem-bench-") as folder:
        print(json.dumps(copy_rates(loaded, folder)), flush=True)
        for row in first_tokens(loaded, folder, args.rounds):
            print(json.dumps(row), flush=True)


def engine_of(loaded: LoadedModel, folder: str) -> Engine:
    host = HostConfig(enable_cache=True, ratio=2.0, write_policy=WritePolicy.WRITE_THROUGH, storage_dir=folder)
    return Engine.build(loaded, replace(loaded.config, cache=replace(loaded.config.cache, host=host)))


def copy_rates(loaded: LoadedModel, folder: str) -> dict[str, object]:
    """Measured as the engine measures them, on an engine that does nothing else."""
    with engine_of(loaded, folder) as engine:
        test = engine.self_test()
        page_size, page_bytes = engine.geometry.page_size, engine.geometry.page_bytes
        rates = {kind: best_rate(engine, kind) for kind in (CopyKind.DEVICE_TO_HOST, CopyKind.HOST_TO_DEVICE)}
    swap_s = sum(1 / rate for rate in rates.values())
    return {
        "benchmark": "copy",
        "page_bytes": page_bytes,
        **{f"{kind.value}_gb_per_s": round(rate * page_bytes / 1e9, 2) for kind, rate in rates.items()},
        "prefill_tokens_per_s": round(test.prefill_tokens_per_s, 1),
        "recompute_over_swap": round(page_size / test.prefill_tokens_per_s / swap_s, 1),
        "threads": loaded.threads,
    }


def best_rate(engine: Engine, kind: CopyKind) -> float:
    """Pages per second of the fastest of twenty copies; the first touches fresh memory."""
    dice = random.Random(kind.value)
    rates = []
    for _ in range(20):
        source, target = (dice.sample(range(1, PAGES), BATCH) for _ in range(2))
        done = engine.memory.copies.submit(PageCopy(kind=kind, source=source, target=target)).result()
        rates.append(done.pages / done.seconds)
    return max(rates)


def first_tokens(loaded: LoadedModel, folder: str, rounds: int) -> list[dict[str, object]]:
    """Each round takes a new prefix, computes it, and then finds it on the device, in host memory and in files."""
    vocab_size = loaded.model_config.vocab_size
    places = {"cold": nothing, "device": nothing, "host": empty_device, "files": empty_host}
    seconds: dict[str, list[float]] = {place: [] for place in places}
    with engine_of(loaded, folder) as engine:
        first_token(engine, random_ids(random.Random(0), PREFIX, vocab_size), "warm")
        for number in range(1, rounds + 1):
            dice = random.Random(number)
            prefix = random_ids(dice, PREFIX, vocab_size)
            for place, prepare in places.items():
                prepare(engine)
                before = found_in(engine)
                prompt = (*prefix, *random_ids(dice, SUFFIX, vocab_size))
                seconds[place].append(first_token(engine, prompt, f"{place}-{number}"))
                assert found_in(engine)[place] > before[place], f"the prefix was not found in {place}"
                settle(engine)
    device = statistics.median(seconds["device"])
    return [
        {
            "benchmark": "ttft",
            "prefix_tokens": PREFIX,
            "prefix_in": place,
            "ttft_ms": round(statistics.median(measured) * 1e3, 2),
            "over_device": round(statistics.median(measured) / device, 2),
            "threads": loaded.threads,
        }
        for place, measured in seconds.items()
    ]


def found_in(engine: Engine) -> dict[str, int]:
    """Prompt tokens so far, by where their KV was."""
    stats = engine.stats()
    below = stats.host_cached_tokens_total + stats.disk_cached_tokens_total
    return {
        "cold": stats.prompt_tokens_total - stats.cached_tokens_total,
        "device": stats.cached_tokens_total - below,
        "host": stats.host_cached_tokens_total,
        "files": stats.disk_cached_tokens_total,
    }


def nothing(_engine: Engine) -> None:
    """The prefix is where it should be."""


def empty_device(engine: Engine) -> None:
    """Reserve every page of the pool for a moment, so that nothing stays cached."""
    pages = engine.memory.reserve_pages(engine.memory.available_pages())
    assert pages is not None, "an idle engine has all its pages"
    engine.memory.give_back(pages)
    settle(engine)


def empty_host(engine: Engine) -> None:
    """The same for host memory."""
    empty_device(engine)
    assert engine.memory.host is not None, "this engine was built with host memory"
    assert engine.memory.host.tier.make_room(engine.memory.host.pool.num_pages), "idle, and not all can be evicted"


def settle(engine: Engine) -> None:
    """Let backups and writes to files end."""
    while engine.step():
        time.sleep(0.001)
    time.sleep(0.05)
    while engine.step():
        time.sleep(0.001)


def first_token(engine: Engine, prompt: tuple[int, ...], rid: str) -> float:
    """Seconds to the first token of `prompt`."""
    request = Job(prompt=prompt, output_len=1).request(rid)
    began = time.perf_counter()
    engine.generate([request])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
