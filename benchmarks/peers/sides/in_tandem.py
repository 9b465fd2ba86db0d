"""Tandem's library in a process of its own, asked in lines (`peers.lines`)."""

from pathlib import Path
from typing import Any

from peers.lines import Batch, Generate, serve


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))) << 10


def load(start: dict[str, Any]) -> tuple[Generate, Any]:
    import torch

    bare = resident_bytes()
    from tandem_engine.library.llm import LLM
    from tandem_engine.library.sampling_params import SamplingParams

    llm = LLM(
        start["model"],
        progress=False,
        dtype=start["dtype"],
        threads=start["threads"],
        context_length=start["context"],
        max_running_requests=start["streams"],
        kv_cache_gib=start["kv_gib"],
        chunked_prefill_size=2048,
    )

    def generate(batch: Batch) -> list[list[int]]:
        params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for _, length in batch]
        outputs = llm.generate([prompt for prompt, _ in batch], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def facts() -> dict[str, Any]:
        return {"torch": torch.__version__, "bare_bytes": bare, "resident_bytes": resident_bytes()}

    return generate, facts


if __name__ == "__main__":
    serve(load)
