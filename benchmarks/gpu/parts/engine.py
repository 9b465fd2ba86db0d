"""The engine of one model."""

from gpu.control.bench import Bench
from gpu.engine import TINY, EngineRun, Loads
from gpu.shapes import SHAPES

LOADS = {
    "8B": Loads(),
    "30B-A3B": Loads(
        decode=((1, 512), (64, 512), (16, 4096), (1, 4096)),
        prefill=(8192, 2048),
        prompts=(128, 512),
        float8=(),
        peers=False,
    ),
    "0.6B": Loads(
        decode=((1, 512), (64, 512), (64, 4096), (256, 512)),
        prefill=(8192,),
        prompts=(128, 2048, 16, 512),
        float8=(),
    ),
}
"""Where one card has less room, or others have been measured, less is."""


def run(bench: Bench, model: str) -> None:
    shape = SHAPES[model] if not bench.tiny else SHAPES["tiny MoE" if SHAPES[model].experts else "tiny"]
    EngineRun(bench=bench, shape=shape, loads=TINY if bench.tiny else LOADS[model]).measure()
