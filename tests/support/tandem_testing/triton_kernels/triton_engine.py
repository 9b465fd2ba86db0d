"""Whole engines with the attention of a device, whatever way a token is planned: tokens of transformers."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_engine.executor.platform import OnHost, gpu_attention
from tandem_lab.verify.engines import PlatformMaker
from tandem_lab.verify.reference import PromptSet
from tandem_testing.exactness import CACHED, CHUNKED, MIXED, run_paths_of
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head

WHOLE = "whole prompts, no overlap"
MAX_TOKENS = 4
"""So that one prompt still decodes when the next arrives. The interpreter takes a tenth of a second for a step."""


class Interpreted(OnHost):
    """A CPU with the attention of a GPU."""

    def attention(self, pool, num_heads, specs, dtype):
        return gpu_attention(pool, num_heads, specs, dtype)


def long_prompts() -> PromptSet:
    """A short one, and two that share their first page and end in the third."""
    ids = random.Random(3)
    shared = [ids.randrange(256) for _ in range(18)]
    rest = [[ids.randrange(256) for _ in range(length)] for length in (5, 19, 16)]
    return PromptSet(prompts=(tuple(rest[0]), (*shared, *rest[1]), (*shared, *rest[2])), max_tokens=MAX_TOKENS)


def check_whole_prompts_and_cached_prefixes(device: str) -> None:
    equals_transformers("llama-llama3-rope", (WHOLE, CACHED))


def check_chunks_and_mixed_steps_with_windows_and_caps(device: str) -> None:
    equals_transformers("gemma2", (CHUNKED, MIXED))


def check_norms_of_q_and_k_that_the_plan_does_not_apply(device: str) -> None:
    """Over all heads before the plan rotates them; and after a rotation, which the plan then leaves to the layer."""
    prompts = PromptSet(prompts=(tuple(range(30, 49)), (5, 9, 200)), max_tokens=3)
    for name in ("minimax-m2", "hunyuan"):
        equals_transformers(name, (CHUNKED,), prompts=prompts)


def equals_transformers(
    name: str, paths: tuple[str, ...], *, platform: PlatformMaker = Interpreted, prompts: PromptSet | None = None
) -> None:
    with TemporaryDirectory(prefix="tandem-triton-") as folder:
        checkpoint = write_tiny_checkpoint(name, Path(folder) / "model")
        write_tiny_head(checkpoint, Path(f"{checkpoint}-eagle"))
        model = load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)
        results = run_paths_of(model, paths, platform=platform, prompts=prompts or long_prompts())
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in paths]
