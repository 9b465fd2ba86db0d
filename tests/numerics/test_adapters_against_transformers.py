"""Adapters equal W + s · B A in transformers: base and adapters in one step, every family, whole and decoded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem_engine.forward.adapter_rows import NO_ADAPTER
from tandem_engine.parallel.group import Parallel
from tandem_lab.verify.merged_adapter import merge_adapter
from tandem_testing.adapted_models import load_adapted
from tandem_testing.adapters import ATTENTION, SEVEN, STATES, write_adapter
from tandem_testing.dense_attention import DenseAttend
from tandem_testing.rank_threads import on_ranks
from tandem_testing.tiny_checkpoints import TINY_MODELS, VOCAB_SIZE, TinyModel, write_tiny_checkpoint

ATOL = 1e-4
WORTH_SEEING = 1e-2
"""By so much at least an adapter changes the logits."""


def truth(path: Path, ids: Tensor, adapter: Path | None = None) -> Tensor:
    """Logits [T, vocab] of transformers, with `adapter` merged."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        merge_adapter(model, adapter)
    with torch.inference_mode():
        logits: Tensor = model.eval()(input_ids=ids[None]).logits[0]
    return logits


def prompt(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def require_equal(path: Path, got: Tensor, ids: Tensor, adapter: Path | None = None) -> None:
    expected = truth(path, ids, adapter)
    assert (got - expected).abs().max() <= ATOL
    if adapter is not None:
        assert (expected - truth(path, ids)).abs().max() > WORTH_SEEING


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


FAMILIES = {
    "llama-bias": SEVEN,
    "qwen3": SEVEN,
    "gemma2": SEVEN,
    "mixtral": ATTENTION,
    "qwen3-moe": SEVEN,
    "olmo2": SEVEN,
    "glm4": (*ATTENTION, "down_proj"),
    "cohere2": SEVEN,
    "granite": SEVEN,
    "gpt-oss": ATTENTION,
}
"""With the projections that have adapters; experts have none."""


@pytest.mark.parametrize("family", FAMILIES)
def test_base_and_adapters_share_a_step(family: str, folder: Path) -> None:
    path = write_tiny_checkpoint(family, folder / family)
    one = write_adapter(folder / f"{family}-one", path, seed=1, modules=FAMILIES[family], strength=0.3)
    two = write_adapter(folder / f"{family}-two", path, seed=2, modules=["q_proj"], rank=1, alpha=3)
    adapted = load_adapted(path, one, two)
    prompts, slots = [prompt(length, length) for length in (5, 7, 9, 4)], (0, NO_ADAPTER, 1, 0)
    got = adapted.logits(prompts, slots).split([len(each) for each in prompts])
    for ids, slot, logits in zip(prompts, slots, got, strict=True):
        require_equal(path, logits, ids, None if slot == NO_ADAPTER else (one, two)[slot])


CASES: Mapping[str, dict[str, Any]] = {
    "pattern of ranks": {"ranks": {"layers.1.self_attn.q_proj": 2, "down_proj": 7}},
    "pattern of alphas": {"alpha_pattern": {"v_proj": 3, "layers.0.mlp.up_proj": 20}},
    "rank-stabilized": {"use_rslora": True, "ranks": {"k_proj": 3}},
    "last layer alone": {"layers": [2]},
    "bfloat16": {"dtype": torch.bfloat16},
    "key and value": {"modules": ["k_proj", "v_proj"]},
    "negative alpha": {"alpha": -6},
}


@pytest.mark.parametrize("case", CASES)
def test_scales_and_parts_are_those_of_the_config(case: str, folder: Path) -> None:
    path = write_tiny_checkpoint("llama-bias", folder / case / "model")
    one = write_adapter(folder / case / "adapter", path, strength=0.3, **CASES[case])
    ids = prompt(11, 3)
    require_equal(path, load_adapted(path, one).logits([ids], [0]), ids, one)


def test_last_layer_adds_to_the_wanted_rows_alone(folder: Path) -> None:
    path = write_tiny_checkpoint("qwen3", folder / "wanted-model")
    one = write_adapter(folder / "wanted", path, layers=[2])
    adapted = load_adapted(path, one)
    prompts, slots = [prompt(6, 1), prompt(6, 2), prompt(5, 3)], (NO_ADAPTER, 0, 0)
    wanted = torch.tensor([16, 2, 7, 11, 11])
    everything = adapted.logits(prompts, slots)
    assert torch.allclose(adapted.logits(prompts, slots, wanted), everything[wanted], atol=1e-5)
    require_equal(path, everything[6:12], prompts[1], one)


def test_base_rows_keep_their_bits_in_a_mixed_step(folder: Path) -> None:
    path = write_tiny_checkpoint("qwen3", folder / "bits-model")
    adapted = load_adapted(path, write_adapter(folder / "bits", path))
    prompts = [prompt(6, 1), prompt(8, 2)]
    lens = [6, 8]
    attend = DenseAttend(specs=adapted.ours.attention, extend_lens=lens)
    positions = torch.cat([torch.arange(length) for length in lens])
    with torch.inference_mode():
        hidden = adapted.ours.forward(torch.cat(prompts), positions, attend, torch.arange(14))
        alone = adapted.ours.logits(hidden)
    mixed = adapted.logits(prompts, (NO_ADAPTER, 0))
    assert torch.equal(mixed[:6], alone[:6])
    assert not torch.allclose(mixed[6:], alone[6:], atol=WORTH_SEEING)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_two_ranks_equal_one(kv_heads: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyModel(config_class="LlamaConfig", fields={"num_key_value_heads": kv_heads, "attention_bias": True})
    monkeypatch.setitem(TINY_MODELS, "shared-heads", tiny)
    path = write_tiny_checkpoint("shared-heads", folder / f"ranks-{kv_heads}")
    one = write_adapter(folder / f"ranks-{kv_heads}-one", path, strength=0.3)
    ids = prompt(9, 4)

    def on_rank(parallel: Parallel) -> Tensor:
        part = load_adapted(path, one, group=parallel.forward)
        return part.logits([ids, ids], [0, NO_ADAPTER])

    for logits in on_ranks(2, on_rank):
        require_equal(path, logits[:9], ids, one)
        require_equal(path, logits[9:], ids)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_merged_reference_equals_peft(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    path = write_tiny_checkpoint("qwen3", folder / "peft-model")
    options: dict[str, Any] = {"ranks": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    one = write_adapter(folder / "peft", path, use_rslora=True, **options)
    ids = prompt(9, 5)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        theirs = peft.PeftModel.from_pretrained(model, one).eval()(input_ids=ids[None]).logits[0]
    assert torch.allclose(theirs, truth(path, ids, one), atol=ATOL)
    require_equal(path, load_adapted(path, one).logits([ids], [0]), ids, one)


@pytest.mark.parametrize("family", STATES)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapter_of_states_that_peft_wrote_equals_peft(family: str, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    path = write_tiny_checkpoint(family, folder / f"{family}-peft-model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    targets = [*ATTENTION, *STATES[family]]
    torch.manual_seed(3)
    trained = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    written = folder / f"{family}-peft"
    trained.save_pretrained(written)
    ids = prompt(70, 6)
    with torch.inference_mode():
        theirs, base = trained(input_ids=ids[None]).logits[0], truth(path, ids)
    assert (theirs - base).abs().max() > WORTH_SEEING
    both = load_adapted(path, written).logits([ids, ids], [0, NO_ADAPTER])
    assert torch.allclose(both[:70], theirs, atol=ATOL)
    assert torch.allclose(both[70:], base, atol=ATOL)
