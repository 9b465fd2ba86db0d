"""More LoRA adapters than workers have room for, loaded for requests while one process after the other dies (74).

Workers have two ranks and room for two adapters; requests of the model and of four adapters come in turn, so adapters
are loaded and evicted all the time. The reference has all of them, from commands; its outputs are compared with those
of transformers, whose weights have the adapter merged.
"""

import asyncio
import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from tandem_lab.verify.merged_adapter import merge_adapter
from tandem_testing.chaos.families.adapters import loaded, spread, written
from tandem_testing.chaos.families.crashes import LONG_PROMPT
from tandem_testing.chaos.fleet import Shape
from tandem_testing.chaos.parts import Worker
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind, Load
from tandem_testing.waiting import until

NAMES = ("one", "two", "three", "four")
ROOM = 2
FOLDER = Path(tempfile.gettempdir(), f"tandem-chaos-adapters-{os.getpid()}")
"""Workers allow it at their start, before the scenario begins."""

ON_DEMAND = Shape(
    prefill=1,
    engine_flags=(
        "--allow-runtime-lora-updating",
        *("--lora-dir", str(FOLDER)),
        *("--max-cpu-loras", str(ROOM)),
        *("--lora-turn", "0.2"),
        *("--tensor-parallel-size", "2"),
    ),
)
TOKENS = 12
"""Of outputs that transformers computes as well."""

Fault = Callable[[Run, Load], Awaitable[None]]


async def a_decode_worker(run: Run, load: Load) -> None:
    (await run.busiest_decode(load)).kill()


async def one_rank(run: Run, load: Load) -> None:
    worker = await run.busiest_decode(load)
    ranks = ranks_of(worker)
    run.expect(ranks, f"{worker.id} has no rank beside the first")
    for pid in ranks[:1]:
        os.kill(pid, signal.SIGKILL)


def ranks_of(worker: Worker) -> list[int]:
    """Processes of all ranks but the first, whose children they are."""
    found = []
    for engine in worker.engine_pids():
        try:
            children = Path(f"/proc/{engine}/task/{engine}/children").read_text("ascii").split()
            found += [int(pid) for pid in children if b"rank" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        except FileNotFoundError:
            continue
    return found


async def the_prefill_worker(run: Run, load: Load) -> None:
    run.fleet.of_role("prefill")[0].kill()


async def a_gateway(run: Run, load: Load) -> None:
    """Of no stream: those end with their gateway (14). Its names of adapters have to come back."""
    run.fleet.gateways[1].part.send(signal.SIGKILL)


async def redis(run: Run, load: Load) -> None:
    """Back and empty, it gets the names from the gateways again."""
    run.fleet.redis.kill()
    load.send(asked_of(run, count=len(NAMES) + 1, first=900))
    await asyncio.sleep(1.0)
    run.fleet.redis.restart()


async def the_router_in_redis(run: Run, load: Load) -> None:
    run.fleet.redis.command("FUNCTION", "FLUSH")


FAULTS: tuple[Fault, ...] = (a_decode_worker, one_rank, the_prefill_worker, a_gateway, redis, the_router_in_redis)


@scenario(74, shape=ON_DEMAND, timeout_s=1800.0)
async def processes_die_while_adapters_load(run: Run) -> None:
    atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
    folders = written(FOLDER, run.fleet.checkpoint, NAMES)
    await run.fleet.all_ready(READY_TIMEOUT_S)
    for name, folder in folders.items():
        await asyncio.gather(*(loaded(fleet, name, folder) for fleet in (run.reference.fleet, run.fleet)))
    await equals_merged_weights(run, folders)
    for number, fault in enumerate(FAULTS):
        await happens(run, fault, first=100 * number)
        await run.fleet.all_ready(READY_TIMEOUT_S)
        await served_by_every_gateway(run, first=100 * number + 50)
    run.expect(await counted(run, "evictions") > 0, "no adapter has made way for another")


async def happens(run: Run, fault: Fault, *, first: int) -> None:
    """Under load that other adapters are loaded for."""
    speaking = max(2, run.scale.streams // 4)
    async with run.load(1) as load:
        load.send(asked_of(run, count=run.scale.streams, first=first))
        await until(lambda: load.speaking >= speaking, PATIENCE_S, f"{speaking} streams speak")
        run.expect(await counted(run, "loads") > 0, f"no adapter was loaded before {fault.__name__}")
        await fault(run, load)
        died = run.now()
        await run.judge(await load.gathered(), after=died)


def asked_of(run: Run, *, count: int, first: int) -> list[Ask]:
    asked = run.asks(Kind.PLAIN, Kind.SEEDED, count=count, prompt_words=LONG_PROMPT // 4, first=first)
    return run.fresh(spread(asked, NAMES))


async def served_by_every_gateway(run: Run, *, first: int) -> None:
    async with run.load() as load:
        load.send(asked_of(run, count=2 * len(run.fleet.gateways) * (len(NAMES) + 1), first=first))
        await run.judge(await load.gathered())


async def counted(run: Run, what: str) -> float:
    """On all workers, since each of them has started."""
    name = f"tandem_worker_lora_{what}_total"
    return sum([await run.fleet.metric(worker.url, name) for worker in run.fleet.workers])


async def equals_merged_weights(run: Run, folders: dict[str, Path]) -> None:
    """What the reference says with each adapter is what transformers says with the adapter merged."""
    asked = run.asks(Kind.PLAIN, count=1, tokens=TOKENS, first=990)
    wanted = [replace(ask, adapter=name) for name in folders for ask in asked]
    answers = await run.reference.answers(wanted)
    for ask, answer in zip(wanted, answers, strict=True):
        merged = await asyncio.to_thread(
            merged_text, run.fleet.checkpoint, folders[ask.adapter], ask.prompt, ask.max_tokens
        )
        received = answer.choices[0].text
        run.expect(received == merged, f"{ask.adapter}: the reference says {received!r}, merged weights {merged!r}")


def merged_text(base: Path, folder: Path, prompt: str, tokens: int) -> str:
    """Greedy, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    merge_adapter(model, folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(ids, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
