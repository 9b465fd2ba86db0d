"""LoRA adapters that are loaded by a gateway's command, on workers that die (67).

A worker that comes back has the adapters of its flags alone, which are none here. Until the command is repeated, the
other worker of its role serves them.
"""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

from tandem_testing.adapters import SEVEN, base_modules, write_adapter
from tandem_testing.chaos.families.crashes import LONG_PROMPT, computing
from tandem_testing.chaos.fleet import Fleet, Shape
from tandem_testing.chaos.scenario import PATIENCE_S, READY_TIMEOUT_S, Run, scenario
from tandem_testing.chaos.streams import Ask, Kind
from tandem_testing.waiting import until

UPDATING = Shape(engine_flags=("--allow-runtime-lora-updating",))
EARLY = ("one", "two")
LATE = "three"
"""Loaded while a worker dies."""


def spread(asked: list[Ask], adapters: tuple[str, ...]) -> list[Ask]:
    """Each kind of `asked` with the model alone and with every adapter in turn."""
    names = ("", *adapters)
    return [replace(ask, adapter=names[number // 2 % len(names)]) for number, ask in enumerate(asked)]


def written(folder: Path, base: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """Folders of adapters of `base`, by name: of all projections that may have some, which experts may not."""
    modules = tuple(dict.fromkeys(module.rpartition(".")[2] for module in base_modules(base, SEVEN, None)))
    return {
        name: write_adapter(folder / name, base, seed=seed, modules=modules) for seed, name in enumerate(names, start=1)
    }


async def loaded(fleet: Fleet, name: str, folder: Path) -> None:
    """Repeats the command while workers come and go, as its response says; then every gateway has the adapter."""

    async def taken() -> bool:
        body = {"lora_name": name, "lora_path": str(folder)}
        response = await fleet.http.post(f"{fleet.gateways[0].url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S)
        assert response.status_code in (200, 503), f"{name}: {response.status_code} {response.text}"
        return response.status_code == 200

    async def known() -> bool:
        listings = [await fleet.http.get(f"{gateway.url}/v1/models") for gateway in fleet.gateways]
        return all(name in [model["id"] for model in listing.json()["data"]] for listing in listings)

    await until(taken, PATIENCE_S, f"{name} is loaded")
    await until(known, PATIENCE_S, f"every gateway has {name}")


async def serves(run: Run, adapters: tuple[str, ...]) -> None:
    """The same requests of the model alone and of every adapter, through every gateway; the outputs differ."""
    names = ("", *adapters)
    asked = run.asks(Kind.PLAIN, count=2 * len(run.fleet.gateways), tokens=16, prompt_words=100, first=500)
    async with run.load() as load:
        load.send(run.fresh([replace(ask, adapter=name) for name in names for ask in asked]))
        answers = await load.gathered()
    await run.judge(answers)
    outputs = {
        name: tuple(answer.choices[0].text for answer in answers if answer.ask.adapter == name and answer.choices)
        for name in names
    }
    run.expect(len(set(outputs.values())) == len(names), f"adapters have equal outputs: {outputs}")


@scenario(67, shape=UPDATING)
async def workers_with_adapters_die(run: Run) -> None:
    folders = written(run.fleet.folder / "adapters", run.fleet.checkpoint, (*EARLY, LATE))
    for name in EARLY:
        await asyncio.gather(*(loaded(fleet, name, folders[name]) for fleet in (run.reference.fleet, run.fleet)))
    await loaded(run.reference.fleet, LATE, folders[LATE])
    await a_decode_worker_dies(run, folders)
    await a_prefill_worker_dies(run, folders)
    gateway = run.fleet.gateways[1]
    gateway.part.send(signal.SIGKILL)
    await until(lambda: not gateway.part.alive, PATIENCE_S, "the gateway is dead")
    await load_again(run, folders)
    await serves(run, tuple(folders))


async def a_decode_worker_dies(run: Run, folders: dict[str, Path]) -> None:
    """Another adapter is loaded at that moment."""
    lost = await run.lost_attempts()
    async with run.load() as load:
        load.send(spread(run.asks(Kind.GREEDY, Kind.SEEDED), EARLY))
        speaking = max(2, run.scale.streams // 3)
        await until(lambda: load.speaking >= speaking, PATIENCE_S, f"{speaking} streams speak")
        (await run.busiest_decode(load)).kill()
        died = run.now()
        await loaded(run.fleet, LATE, folders[LATE])
        await run.judge(await load.gathered(), after=died)
    run.expect(await run.lost_attempts() > lost, "no stream was on the decode worker that died")
    await load_again(run, folders)


async def a_prefill_worker_dies(run: Run, folders: dict[str, Path]) -> None:
    """While it computes prompts."""
    lost = await run.lost_attempts()
    asked = run.asks(Kind.PLAIN, tokens=24, prompt_words=2 * LONG_PROMPT, count=max(6, run.scale.streams // 3))
    async with run.load() as load:
        load.send(spread(asked, EARLY))
        (await computing(run)).kill()
        died = run.now()
        await run.judge(await load.gathered(), after=died)
    run.expect(await run.lost_attempts() > lost, "no request was on the prefill worker that died")
    await load_again(run, folders)


async def load_again(run: Run, folders: dict[str, Path]) -> None:
    """Every worker is back and has every adapter."""
    await run.fleet.all_ready(READY_TIMEOUT_S)
    for name, folder in folders.items():
        await loaded(run.fleet, name, folder)
