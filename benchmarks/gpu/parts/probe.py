"""What everything else rests on, in a minute: versions, ceilings, and whether results are right.

A wrong result is found here, so that figures may come before the tests.
"""

import importlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpu.control.bench import Bench
from gpu.control.lines import Check

KERNELS = "tandem_testing.triton_kernels"
CHECKS = (
    ("delta_runs", "check_runs_of_several_sequences"),
    ("delta_runs", "check_padding_changes_nothing"),
    ("expert_kernels", "check_tiles_change_no_bit"),
    ("triton_backend", "check_a_prompt_graph_over_latents_gives_the_bits_of_a_plan"),
    ("decode_attention", "check_half_precision"),
    ("decode_attention", "check_company_and_programs_change_no_bit"),
    ("extend_attention", "check_half_precision"),
)
"""What has not run on a device yet; attention against float64, and whether company changes a result."""
PATHS = ("chunked by 7, overlap", "mixed, staggered, no graphs", "twice, to the bit")


def run(bench: Bench) -> None:
    record = bench.record
    record.case("ceilings", lambda: _print_ceilings(bench), needs_s=5)
    for module, check in CHECKS:
        record.case(f"{module}: {check}", partial(_kernel, bench, module, check), needs_s=10)
    record.case("an engine equals transformers", partial(_engine, bench), needs_s=20)
    if find_spec("nixl") is not None:
        record.case("a transfer by NIXL", partial(_transfer, bench), needs_s=10)


def _print_ceilings(bench: Bench) -> None:
    found = bench.ceilings
    print(f"copy {found.copy_bytes_per_s / 1e9:.0f} GB/s, matmul {found.matmul_flops / 1e12:.0f} TFLOP/s", flush=True)


def _checked(bench: Bench, case: str, check: Callable[[], str]) -> None:
    """Record whether it passed: `check` returns the fault, or raises."""
    began = time.monotonic()
    why = check()
    outcome = "failed" if why else "passed"
    seconds = round(time.monotonic() - began, 2)
    bench.record.write(Check(part=bench.record.part, case=case, outcome=outcome, why=why, seconds=seconds))


def _kernel(bench: Bench, module: str, check: str) -> None:
    def passes() -> str:
        getattr(importlib.import_module(f"{KERNELS}.{module}"), check)(str(bench.device))
        return ""

    _checked(bench, f"{module}: {check}", passes)


def _engine(bench: Bench) -> None:
    from tandem_engine.config import EngineConfig
    from tandem_engine.engine.loaded_model import load
    from tandem_testing.exactness import run_paths_of
    from tandem_testing.tiny_checkpoints import write_tiny_checkpoint

    def agrees() -> str:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_tiny_checkpoint("qwen3", Path(folder) / "model")
            config = EngineConfig(model_path=str(checkpoint), dtype="float32", device=str(bench.device))
            results = run_paths_of(load(config, progress=False), PATHS, every=4)
        return "; ".join(f"{each.path}: {each.difference}" for each in results if each.difference is not None)

    _checked(bench, "an engine equals transformers", agrees)


def _transfer(bench: Bench) -> None:
    """Between two agents of this process; how it is between two is the part `handoff`."""
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    def moves() -> str:
        source = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=bench.device)
        target = torch.zeros_like(source)
        kind, number = ("DRAM", 0) if bench.device.type == "cpu" else ("VRAM", bench.device.index or 0)
        agents = []
        for name, tensor in (("sender", source), ("receiver", target)):
            agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
            agent.register_memory([(tensor.data_ptr(), tensor.nbytes, number, "")], kind)
            agents.append(agent)
        sender, receiver = agents
        peer = sender.add_remote_agent(receiver.get_agent_metadata())
        pieces = [sender.get_xfer_descs([(each.data_ptr(), each.nbytes, number)], kind) for each in (source, target)]
        handle = sender.initialize_xfer("WRITE", *pieces, peer)
        state = sender.transfer(handle)
        while state == "PROC":
            state = sender.check_xfer_state(handle)
            receiver.get_new_notifs()
        return "" if state == "DONE" and torch.equal(source, target) else f"state {state}, or other bytes arrived"

    _checked(bench, "a transfer by NIXL", moves)
