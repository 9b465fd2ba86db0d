"""The engine of one model."""

from dataclasses import replace

from gpu.control.bench import Bench
from gpu.engine import TINY, EngineRun, Loads
from gpu.shapes import SHAPES

FIRST = Loads(
    decode=((64, 512), (1, 512), (64, 4096)), sampled=(), prefill=(8192, 2048), prompts=(128, 512, 1024, 16), float8=(),
    peers=False,
)  # fmt: skip
"""Of families whose prompts by graphs have no figures yet."""
LOADS = {
    "V2-Lite": FIRST,
    "Next": FIRST,
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


TINY_OF = {"30B-A3B": "tiny MoE", "V2-Lite": "tiny latents", "Next": "tiny states"}


def tiny_loads(model: str) -> Loads:
    """Of a rehearsal: pages of float8 only where a device has them too. Latents cannot be stored so."""
    return TINY if LOADS[model].float8 else replace(TINY, float8=())


def run(bench: Bench, model: str) -> None:
    shape = SHAPES[TINY_OF.get(model, "tiny") if bench.tiny else model]
    EngineRun(bench=bench, shape=shape, loads=tiny_loads(model) if bench.tiny else LOADS[model]).measure()
