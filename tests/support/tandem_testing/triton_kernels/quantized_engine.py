"""A whole engine on a CPU whose layers are kernels over weights as a checkpoint stores them.

Projections, experts and the output matrix, four bits each, inputs in another order than their groups.
"""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file

from tandem_engine.config import EngineConfig
from tandem_engine.engine.loaded_model import load
from tandem_lab.verify.reference import PromptSet
from tandem_testing.checkpoint_files import write_config
from tandem_testing.exactness import CHUNKED, DISAGGREGATED, MIXED, run_paths_of
from tandem_testing.quantized_files import KERNEL_KINDS, QWEN3_MOE, write_quantized
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels


def check_packed_weights_in_chunks_mixed_and_handed_over(device: str) -> None:
    """transformers has the numbers that the packed ones stand for."""
    paths = (CHUNKED, MIXED, DISAGGREGATED)
    with TemporaryDirectory(prefix="tandem-quantized-") as folder:
        quantized, worth = Path(folder) / "quantized", Path(folder) / "worth"
        for path in (quantized, worth):
            path.mkdir()
        _, worths = write_quantized(quantized, "gptq, in another order", kinds=KERNEL_KINDS, head=True, **QWEN3_MOE)
        write_config(worth, **QWEN3_MOE)
        save_file({name: values.contiguous() for name, values in worths.items()}, worth / "model.safetensors")
        with layers_by_kernels(device):
            model = load(EngineConfig(model_path=str(quantized), dtype="float32"), progress=False)
            assert "held packed" in model.model_config.quantization
            results = run_paths_of(model, paths, prompts=prompts(), worth=worth)
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in paths]


def prompts() -> PromptSet:
    """One that is cut into chunks, and one that is not."""
    ids = random.Random(5)
    drawn = (tuple(ids.randrange(QWEN3_MOE["vocab_size"]) for _ in range(length)) for length in (9, 3))
    return PromptSet(prompts=tuple(drawn), max_tokens=3)
