"""Compile what a CPU worker compiles when it starts, for the bundled model: `compile-kernels.py THREADS...`

numba keeps the code in NUMBA_CACHE_DIR, for this kind of CPU and for models of the same shape; docker/bin/tandem hands
it to containers. What is run is what workers run: a prefill and a decode engine with a transport between them, the test
of themselves that they make before they serve, and a few requests.
"""

import argparse
import subprocess
import sys

from tandem_engine.config import Role
from tandem_engine.config.flags import add_engine_flags, engine_config
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_lab.verify.engine_pairs import Pair
from tandem_lab.verify.engines import Alone

MODEL = "/opt/tandem/models/tandem-mini"
DTYPES = ("float32", "bfloat16")
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 40, 8


def compile_for(dtype: str, threads: str) -> None:
    """Two engines come up, answer and go."""
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    args = parser.parse_args(["--dtype", dtype, "--threads", threads, "--kv-cache-gib", "0.1"])
    args.model, args.role = MODEL, Role.BOTH.value
    config = engine_config(args)
    maker = Alone(model=load(config, progress=False))
    with Pair.build(maker, maker, config) as pair:
        for engine in (pair.prefill, pair.decode):
            engine.self_test()
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS)
        prompt = tuple(range(1, PROMPT_TOKENS + 1))
        requests = [GenerateRequest(rid=f"{i}", input_ids=(*prompt, i), sampling=sampling) for i in range(REQUESTS)]
        pair.generate(requests, stagger=2)
    print(f"kernels for {dtype} on {threads} threads are compiled")


def main() -> None:
    """One process for each: torch fixes its number of threads when it starts."""
    if sys.argv[1] == "--one":
        compile_for(*sys.argv[2:])
        return
    for threads in sys.argv[1:]:
        for dtype in DTYPES:
            subprocess.run([sys.executable, __file__, "--one", dtype, threads], check=True)


if __name__ == "__main__":
    main()
