"""Engines of a device, interpreted: layers, attention, sampling and tables are kernels, and steps are queued."""

import random
from collections import Counter
from collections.abc import Set

import torch

from tandem_engine.executor.cuda.streams import SHORT_RUN, PageStreams
from tandem_engine.memory.host.pages import HostPool
from tandem_engine.memory.page_copies import CopyKind, PageCopy
from tandem_lab.verify.paths import WITHOUT_GRAPHS
from tandem_lab.verify.reference import PromptSet
from tandem_testing.forward_builders import make_pool
from tandem_testing.plain_device import PlainDevice, PlainStreams
from tandem_testing.triton_kernels.expert_kernels import layers_by_kernels
from tandem_testing.triton_kernels.launches import counting
from tandem_testing.triton_kernels.tensors import kernels_on
from tandem_testing.triton_kernels.triton_engine import equals_transformers

ATTENTION = {"list_kernel", "split_kernel", "combine_kernel", "extend_kernel"}
"""Over K and V."""
EVERY_STEP = {
    "rotate_store_kernel", "rms_norm_kernel", "resolve_kernel", "publish_kernel", "peak_kernel", "settle_kernel",
}  # fmt: skip
"""Kernels of steps of any model: heads on their way to attention, norms, tokens of rows, sampling."""


def short_prompts() -> PromptSet:
    """One of a token, and one that ends in its second page: both decode by a graph at last."""
    ids = random.Random(4)
    return PromptSet(prompts=((7,), tuple(ids.randrange(256) for _ in range(15))), max_tokens=3)


def check_head_norms_and_graphs_and_a_draft_head(device: str) -> None:
    device_equals_transformers("qwen3", "EAGLE drafts", launches={"gated_activation_kernel", "move_rows_kernel"})


def check_offset_norms_windows_and_two_rotations(device: str) -> None:
    device_equals_transformers("gemma3", WITHOUT_GRAPHS, launches={"gated_activation_kernel"})


def check_experts_and_edited_logits(device: str) -> None:
    experts = {"count_kernel", "place_kernel", "gate_up_kernel", "down_kernel"}
    device_equals_transformers("mixtral", "edited: mixed, staggered", launches=experts | {"edit_kernel"})


def check_latents_and_a_shared_expert(device: str) -> None:
    experts = {"count_kernel", "place_kernel", "gate_up_kernel", "down_kernel", "gated_activation_kernel"}
    latents = {"list_kernel", "latent_split_kernel", "combine_kernel", "latent_extend_kernel"}
    device_equals_transformers("deepseek-v3", "mixed, staggered", launches=experts, attention=latents)


def check_states_of_sequences_and_gated_attention(device: str) -> None:
    kernels = {"delta_step_kernel", "unit_lower_inverse_kernel", "walk_runs_kernel"}
    device_equals_transformers("qwen3.5", "mixed, staggered", launches=kernels)


def check_short_runs_of_pages_are_one_launch_and_long_ones_are_commands(device: str) -> None:
    """To the host and back elsewhere, of pages that lie apart."""
    token_bytes = make_pool(page_size=1, num_pages=1).page_bytes
    for slots, launches in ((1, 2), (-(-SHORT_RUN // token_bytes), 0)):
        pool = make_pool(page_size=slots, num_pages=8)
        host, before = HostPool(num_pages=3, page_bytes=pool.page_bytes), pool.data.clone()
        launched: Counter[str] = Counter()
        with kernels_on(device):
            pages = PageStreams(PlainStreams(), pool, host)
        assert torch.equal(pool.data, before), "warming up writes to no page of the device"
        with counting(launched):
            pages.enqueue(PageCopy(kind=CopyKind.DEVICE_TO_HOST, source=[7, 2, 4], target=[1, 0, 2]))
            pages.enqueue(PageCopy(kind=CopyKind.HOST_TO_DEVICE, source=[1, 0, 2], target=[1, 3, 6]))
        assert torch.equal(pool.data[[1, 3, 6]], before[[7, 2, 4]])
        assert launched["gather_pages_kernel"] == launches, f"pages of {pool.page_bytes} bytes"


def device_equals_transformers(
    name: str, path: str, *, launches: Set[str], attention: Set[str] = frozenset(ATTENTION)
) -> None:
    """By every kernel of `EVERY_STEP`, `attention` and `launches`, and with no pass of its own to store K and V."""
    launched: Counter[str] = Counter()
    with layers_by_kernels("cpu"), counting(launched):
        equals_transformers(name, (path,), platform=PlainDevice, prompts=short_prompts())
    assert EVERY_STEP | attention | launches <= launched.keys(), launched
    assert ("store_kernel" in launched) is ("latent_split_kernel" in launched), "latents alone need a pass of their own"
