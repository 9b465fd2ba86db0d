"""Whole engines with a device's attention, and with its products by packed weights: tokens of transformers."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file

from tandem_engine.config import EngineConfig
from tandem_engine.engine import load
from tandem_engine.executor.platform import OnHost, gpu_attention
from tandem_engine.verify.prompts import PromptSet
from tandem_engine.verify.ranks import PlatformMaker
from tandem_testing.checkpoint_files import write_config
from tandem_testing.exactness import CACHED, CHUNKED, DISAGGREGATED, MIXED, run_paths_of
from tandem_testing.quantized_files import KERNEL_KINDS, write_quantized
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_head
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels

WHOLE = "whole prompts, no overlap"
QUANTIZED_SIZES = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
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


def check_packed_weights_in_chunks_mixed_and_handed_over(device: str) -> None:
    """Projections by quantized weights as they are stored; transformers has their numbers."""
    with TemporaryDirectory(prefix="tandem-triton-") as folder:
        quantized, worth = Path(folder) / "quantized", Path(folder) / "worth"
        for path in (quantized, worth):
            path.mkdir()
        _, worths = write_quantized(quantized, "gptq, in another order", kinds=KERNEL_KINDS, **QUANTIZED_SIZES)
        write_config(worth, **QUANTIZED_SIZES)
        save_file({name: values.contiguous() for name, values in worths.items()}, worth / "model.safetensors")
        with layers_by_kernels(device):
            model = load(EngineConfig(model_path=str(quantized), dtype="float32"), progress=False)
            ids = random.Random(5)
            few = PromptSet(prompts=tuple(tuple(ids.randrange(64) for _ in range(n)) for n in (9, 3)), max_tokens=3)
            results = run_paths_of(model, (CHUNKED, MIXED, DISAGGREGATED), prompts=few, worth=worth)
    assert [result.difference for result in results] == [None] * 3


def equals_transformers(
    name: str, paths: tuple[str, ...], *, platform: PlatformMaker = Interpreted, prompts: PromptSet | None = None
) -> None:
    with TemporaryDirectory(prefix="tandem-triton-") as folder:
        checkpoint = write_tiny_checkpoint(name, Path(folder) / "model")
        write_tiny_head(checkpoint, Path(f"{checkpoint}-eagle"))
        model = load(EngineConfig(model_path=str(checkpoint), dtype="float32"), progress=False)
        results = run_paths_of(model, paths, platform=platform, prompts=prompts or long_prompts())
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in paths]
