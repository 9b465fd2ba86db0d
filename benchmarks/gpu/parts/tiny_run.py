"""A small engine that uses a bit of everything: the program of `sanitize`, which runs it ten to fifty times slower."""

import argparse
import tempfile
from pathlib import Path

from gpu.engine import run_s
from gpu.shapes import SHAPES, Shape
from tandem_engine import LLM

PROMPTS = ([3] * 90, [5] * 17, [7] * 2)
OUTPUT = 6
TWO_LAYERS = Shape(
    name="two layers", config=SHAPES["tiny"].config | {"num_hidden_layers": 2, "head_dim": 128, "vocab_size": 512}
)


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m gpu.parts.tiny_run", description=__doc__)
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--dtype", default="bfloat16")
    args = made.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            TWO_LAYERS.write(Path(folder)),
            device=args.device,
            dtype=args.dtype,
            load_format="dummy",
            context_length=256,
            max_running_requests=4,
            num_pages=64,
            chunked_prefill_size=32,
            disable_cuda_graph=True,
            progress=False,
        ) as llm,
    ):
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}):
            run_s(llm, [list(prompt) for prompt in PROMPTS], [OUTPUT] * len(PROMPTS), **sampling)
    print("the tiny run has ended", flush=True)


if __name__ == "__main__":
    main()
