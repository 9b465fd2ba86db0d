"""The mixed load by transformers, in a separate process so that its memory is released: `generate` on one padded
batch, with a static cache and torch.compile, and its continuous batching. Random weights of the same shape.

Jobs go down and seconds come back as lines of JSON. What one way cannot do here costs that way alone.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import msgspec
import torch

from gpu.shapes import Shape

ROUNDS = 2


class Job(msgspec.Struct, frozen=True, kw_only=True):
    prompt: list[int]
    output_len: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the child process."""

    config: dict[str, Any]
    jobs: list[Job]
    device: str
    dtype: str


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One way, and the fastest of its runs; None where it failed."""

    name: str
    seconds: float | None = None
    why_not: str = ""


def measure_peer(shape: Shape, jobs: Sequence[Job], device: str, dtype: torch.dtype, *, limit_s: float) -> list[Peer]:
    """Whatever ways have an answer when the child ends, after `limit_s` at most."""
    order = Order(config=shape.config, jobs=list(jobs), device=device, dtype=str(dtype).removeprefix("torch."))
    with subprocess.Popen(
        [sys.executable, "-m", "gpu.transformers_peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            printed, _ = child.communicate(msgspec.json.encode(order), timeout=max(1.0, limit_s))
            late = ""
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            late = f"no answer within {limit_s:.0f} s"
    found = [msgspec.json.decode(line, type=Peer) for line in printed.splitlines() if line.startswith(b"{")]
    names = {peer.name for peer in found}
    why_not = late or f"the process ended with status {child.returncode}"
    return [*found, *(Peer(name=name, why_not=why_not) for name in WAYS if name not in names)]


def generate(model: Any, jobs: Sequence[Job], **options: object) -> None:
    """One left-padded batch, run to its longest output."""
    width, longest = max(len(job.prompt) for job in jobs), max(job.output_len for job in jobs)
    ids = torch.zeros((len(jobs), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=longest,
        min_new_tokens=longest,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    assert out.shape[1] == width + longest, f"{out.shape[1] - width} new tokens, {longest} were asked for"


def generate_compiled(model: Any, jobs: Sequence[Job]) -> None:
    generate(model, jobs, cache_implementation="static")


def continuous_batching(model: Any, jobs: Sequence[Job]) -> None:
    """All jobs with the longest output: lengths are not per request there, so it is given what it can do."""
    from transformers import GenerationConfig

    if model.device.type == "cpu":
        raise ValueError("it takes all memory of a machine for its cache")
    longest = max(job.output_len for job in jobs)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Made once, by the run that does not count: its cache, and its graphs.
    kept = {"persistent_manager": True} if "persistent_manager" in signature(model.generate_batch).parameters else {}
    prompts = [job.prompt for job in jobs]
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False, **kept)
    assert len(outputs) == len(jobs), f"{len(outputs)} answers for {len(jobs)} prompts"


WAYS: dict[str, Callable[[Any, Sequence[Job]], None]] = {
    "generate": generate,
    "static cache and compile": generate_compiled,
    "continuous batching": continuous_batching,
}


def main() -> None:
    """The child process."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    model = _model(order)
    for name, way in WAYS.items():
        sys.stdout.buffer.write(msgspec.json.encode(_measured(name, way, model, order)) + b"\n")
        sys.stdout.buffer.flush()


def _model(order: Order) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.for_model(**order.config)
    with torch.device(order.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, order.dtype))
    model.generation_config.eos_token_id = None
    return model.eval()


@torch.no_grad()  # continuous batching keeps tensors that it changes outside of inference mode
def _measured(name: str, way: Callable[[Any, Sequence[Job]], None], model: Any, order: Order) -> Peer:
    try:
        way(model, order.jobs)
        return Peer(name=name, seconds=min(_seconds(way, model, order) for _ in range(ROUNDS)))
    except Exception as error:  # noqa: BLE001 - a peer that does not work here is reported as missing, with its reason
        return Peer(name=name, why_not=f"{type(error).__name__}: {str(error)[:200]}")


def _seconds(way: Callable[[Any, Sequence[Job]], None], model: Any, order: Order) -> float:
    if order.device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    way(model, order.jobs)
    if order.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
