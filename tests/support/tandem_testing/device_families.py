"""What a device has to get right of families beyond the plain decoder: their checkpoints, and paths that show it.

Tests of a GPU run them there, and tests on a CPU run the same on the simulated device.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_engine.engine.loaded_model import LoadedModel
from tandem_lab.verify.engines import PlatformMaker, platform_of_device
from tandem_lab.verify.paths import WITHOUT_GRAPHS
from tandem_testing.draft_heads import add_mtp_layer
from tandem_testing.exactness import CACHED, CHUNKED, CONTINUED, MIXED, RETRACTED, SWAPPED, TWICE, run_paths_of
from tandem_testing.mxfp4_files import write_mxfp4
from tandem_testing.tiny_checkpoints import write_tiny_checkpoint, write_tiny_eagle3

HEAD = "EAGLE drafts"
EVERY = 3
"""One prompt in so many: of 51, 5 and 90 tokens, so that one has a whole block of states in the prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFamily:
    """A tiny checkpoint, and the paths that its kernels and memory take part in."""

    write: Callable[[Path], Path]
    """Into a folder that exists."""
    paths: Sequence[str]
    rounded: Sequence[str] = (MIXED, TWICE)
    """In bfloat16. None where a token has one expert: another that rounding chooses is further off than any bound."""


def _tiny(name: str) -> Callable[[Path], Path]:
    return lambda folder: write_tiny_checkpoint(name, folder / "model")


def _gpt_oss(directory: Path) -> Path:
    """With the limit of published models: some versions of transformers compute with that, whatever the config says."""
    write_tiny_checkpoint("gpt-oss", directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"swiglu_limit": 7.0}))
    return directory


def _packed(folder: Path) -> Path:
    return write_mxfp4(_gpt_oss(folder / "plain"), folder / "model", worth=folder / "worth")


def _with_eagle3(folder: Path) -> Path:
    checkpoint = write_tiny_checkpoint("qwen3", folder / "model")
    write_tiny_eagle3(checkpoint, folder / "model-eagle", layers=(0, 1, 2))
    return checkpoint


def _with_layer_ahead(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        checkpoint = add_mtp_layer(write_tiny_checkpoint(name, folder / "model"))
        (folder / "model-eagle").symlink_to(checkpoint)
        return checkpoint

    return write


DEVICE_FAMILIES = {
    "gpt-oss, packed": DeviceFamily(write=_packed, paths=(CHUNKED, MIXED, RETRACTED)),
    "deepseek-v3": DeviceFamily(write=_tiny("deepseek-v3"), paths=(CHUNKED, CACHED, MIXED, SWAPPED, WITHOUT_GRAPHS)),
    "qwen3-next": DeviceFamily(write=_tiny("qwen3-next"), paths=(CHUNKED, CACHED, MIXED, RETRACTED, WITHOUT_GRAPHS)),
    "llama4": DeviceFamily(
        write=_tiny("llama4"), paths=(CHUNKED, CACHED, MIXED, RETRACTED, WITHOUT_GRAPHS), rounded=()
    ),
    "gpt-oss": DeviceFamily(
        write=lambda folder: _gpt_oss(folder / "model"), paths=(CHUNKED, CACHED, MIXED, RETRACTED, WITHOUT_GRAPHS)
    ),
    "gemma3": DeviceFamily(
        write=_tiny("gemma3"), paths=(CHUNKED, CACHED, MIXED, RETRACTED, "drafts by the model itself")
    ),
    "qwen3.5": DeviceFamily(write=_tiny("qwen3.5"), paths=(CHUNKED, CACHED, MIXED, RETRACTED)),
    "mistral": DeviceFamily(write=_tiny("mistral"), paths=(CHUNKED, RETRACTED, CONTINUED, WITHOUT_GRAPHS)),
    "eagle-3": DeviceFamily(write=_with_eagle3, paths=(HEAD, f"{HEAD}, prefix-cached"), rounded=(HEAD,)),
    "mtp, latents": DeviceFamily(
        write=_with_layer_ahead("deepseek-v3"), paths=(HEAD, f"{HEAD}, prefix-cached"), rounded=(HEAD,)
    ),
    "mtp": DeviceFamily(write=_with_layer_ahead("glm4-moe"), paths=(HEAD, f"{HEAD}, retracted"), rounded=(HEAD,)),
}
"""By what is new of each: packed experts; latents and groups of experts; states and their anchors; chunks of attention
in pages of their own; sinks and windows; windows that free their pages; heads of several layers; layers ahead."""


def differences_of(
    model: LoadedModel, paths: Sequence[str], *, platform: PlatformMaker = platform_of_device
) -> dict[str, str | None]:
    """By path, what transformers has otherwise; None where nothing."""
    worth = Path(model.config.model_path).parent / "worth"
    results = run_paths_of(model, paths, platform=platform, every=EVERY, worth=worth if worth.is_dir() else None)
    return {result.path: result.difference for result in results}
