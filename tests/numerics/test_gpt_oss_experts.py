"""gpt-oss in all formats of its experts: logits and paths as transformers has them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import EngineConfig, Quantization
from tandem_engine.engine.loaded_model import load
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.model.loader import load_model
from tandem_engine.model.quantization.levels import int8_levels
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.exactness import CACHED, CHUNKED, DISAGGREGATED, MIXED, RETRACTED, SHARED, run_paths_of
from tandem_testing.mxfp4_files import write_mxfp4
from tandem_testing.tiny_checkpoints import VOCAB_SIZE, write_tiny_checkpoint

PATHS = (CHUNKED, CACHED, MIXED, RETRACTED, DISAGGREGATED, SHARED)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_tiny_checkpoint("gpt-oss", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    return write_mxfp4(plain, folder / "packed", worth=folder / "worth")


def logits_of(
    path: Path,
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    quantization: Quantization = Quantization.DEQUANTIZE,
) -> Tensor:
    config = read_model_config(path, quantization=quantization)
    model = load_model(path, config, dtype, progress=False, quantization=quantization)
    attend = DenseAttend(specs=model.attention, extend_lens=[len(ids)])
    positions = torch.arange(len(ids))
    with torch.inference_mode():
        return model.logits(model.forward(ids, positions, attend, positions))


def logits_of_transformers(path: Path, ids: Tensor, dtype: torch.dtype = torch.float32, **options: object) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", **options).eval()
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0].float()


def prompt() -> Tensor:
    return torch.randint(VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(3))


def test_mxfp4_experts_are_the_numbers_of_transformers(packed):
    from transformers import Mxfp4Config

    theirs = logits_of_transformers(packed, prompt(), quantization_config=Mxfp4Config(dequantize=True))
    torch.testing.assert_close(logits_of(packed, prompt()), theirs, atol=1e-4, rtol=0)


def test_mxfp4_experts_take_the_paths_on_which_pages_meet(packed):
    model = load(EngineConfig(model_path=str(packed), dtype="float32"), progress=False)
    results = run_paths_of(model, PATHS, every=2, worth=packed.parent / "worth")
    assert [(result.path, result.difference) for result in results] == [(path, None) for path in PATHS]


def test_bfloat16_is_no_further_from_the_truth(plain):
    truth = logits_of_transformers(plain, prompt())
    theirs = logits_of_transformers(plain, prompt(), torch.bfloat16)
    ours = logits_of(plain, prompt(), torch.bfloat16)
    assert (ours - truth).norm() < 1.1 * (theirs - truth).norm()


def rounded(name: str, tensor: Tensor) -> Tensor:
    """What int8 leaves of a stored tensor; experts have their inputs first."""
    if name.endswith("_proj.weight"):
        return int8_levels(tensor).values()
    if name.endswith(("gate_up_proj", "down_proj")):
        return torch.stack([int8_levels(each.t()).values().t() for each in tensor]).contiguous()
    return tensor


def test_int8_rounds_plain_experts_and_refuses_mxfp4(plain, packed, tmp_path):
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    save_file({name: rounded(name, tensor) for name, tensor in load_file(file).items()}, file)
    found = logits_of(plain, prompt(), quantization=Quantization.INT8)
    torch.testing.assert_close(found, logits_of(tmp_path, prompt()), atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="--quantization int8"):
        read_model_config(packed, quantization=Quantization.INT8)
