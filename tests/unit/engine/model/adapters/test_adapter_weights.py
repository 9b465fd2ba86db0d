"""Weights of adapters: their digest, and the part of each rank."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.config import AdapterConfig, ModelConfig
from tandem_engine.model.adapters.checkpoint import open_adapter
from tandem_engine.model.adapters.loaded import LoadedAdapters, require_same_content
from tandem_engine.model.adapters.tensor_names import Site
from tandem_engine.model.adapters.weights import AdapterWeights, SiteWeights, load_adapter
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import Parallel, SingleRank
from tandem_testing.adapters import read_files, write_adapter, write_files
from tandem_testing.rank_threads import on_ranks

MODEL = Path(__file__).resolve().parents[5] / "models" / "tandem-mini"


@pytest.fixture(scope="module")
def base() -> ModelConfig:
    return read_model_config(MODEL)


def loaded(
    folder: Path, base: ModelConfig, rank: int = 0, size: int = 1, *, dtype: torch.dtype = torch.float32
) -> AdapterWeights:
    return load_adapter(
        open_adapter(folder, base, max_rank=64), base, dtype=dtype, group=SingleRank(rank=rank, size=size)
    )


def product(site: SiteWeights, x: Tensor, outputs: int) -> Tensor:
    out = torch.zeros(len(x), outputs)
    for part in site.parts:
        out[:, part.outputs] += part.scale * (x @ site.a[part.rows].T @ part.b.T)
    return out


def test_digest_is_of_content_not_of_place(tmp_path: Path, base: ModelConfig) -> None:
    one, other = (loaded(write_adapter(tmp_path / name, MODEL, seed=3), base) for name in ("one", "other"))
    assert one.digest == other.digest
    assert len(one.digest) == 16


def test_digest_changes_with_scale_rank_and_each_byte(tmp_path: Path, base: ModelConfig) -> None:
    folder = write_adapter(tmp_path / "first", MODEL)
    tensors, fields = read_files(folder)
    digests = [loaded(folder, base).digest]
    for name in (min(tensors), max(tensors)):
        changed = {**tensors, name: tensors[name].clone()}
        changed[name].view(torch.uint8)[-1, -4] ^= 1
        digests.append(loaded(write_files(tmp_path / name, changed, fields), base).digest)
    digests.append(loaded(write_files(tmp_path / "alpha", tensors, {**fields, "lora_alpha": 9}), base).digest)
    digests.append(loaded(write_files(tmp_path / "rs", tensors, {**fields, "use_rslora": True}), base).digest)
    digests.append(loaded(write_adapter(tmp_path / "half", MODEL, dtype=torch.bfloat16), base).digest)
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keeps_halves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_stored_in_bfloat16_stay_so_for_compiled_steps(
    tmp_path: Path, base: ModelConfig, stored: torch.dtype, keeps_halves: bool, dtype: torch.dtype
) -> None:
    checkpoint = open_adapter(write_adapter(tmp_path, MODEL, dtype=stored), base, max_rank=64)
    weights = load_adapter(checkpoint, base, dtype=dtype, group=SingleRank(), keeps_halves=keeps_halves)
    plain = load_adapter(checkpoint, base, dtype=dtype, group=SingleRank())
    kept = keeps_halves and stored is torch.bfloat16
    for place, site in weights.sites.items():
        assert site.a.dtype is (torch.bfloat16 if kept else torch.float32)
        assert torch.equal(site.a.float(), plain.sites[place].a)
        for part, other in zip(site.parts, plain.sites[place].parts, strict=True):
            assert part.b.dtype is (torch.bfloat16 if kept else dtype)
            assert torch.equal(part.b.to(dtype), other.b)
    assert weights.digest == plain.digest


def test_ignored_fields_do_not_change_the_digest(tmp_path: Path, base: ModelConfig) -> None:
    one = loaded(write_adapter(tmp_path / "one", MODEL), base)
    other = loaded(write_adapter(tmp_path / "other", MODEL, task_type="CAUSAL_LM", lora_dropout=0.5), base)
    assert one.digest == other.digest


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_ranks_add_up_to_the_whole(tmp_path: Path, base: ModelConfig, size: int) -> None:
    folder = write_adapter(tmp_path, MODEL, ranks={"k_proj": 2})
    whole = loaded(folder, base)
    parts = [loaded(folder, base, rank, size) for rank in range(size)]
    assert {part.digest for part in parts} == {whole.digest}
    for (layer, site), weights in whole.sites.items():
        inputs = weights.a.shape[1]
        x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(layer))
        expected = [part.scale * (x @ weights.a[part.rows].T @ part.b.T) for part in weights.parts]
        if site.column_parallel:
            for place, one in enumerate(expected):
                runs = [_of_rank(part.sites[layer, site], place, x) for part in parts]
                assert torch.allclose(_joined(runs, one.shape[1]), one, atol=1e-5)
        else:
            share = inputs // size
            summed = sum(
                product(part.sites[layer, site], x[:, rank * share : (rank + 1) * share], expected[0].shape[1])
                for rank, part in enumerate(parts)
            )
            assert torch.allclose(summed, expected[0], atol=1e-4)


def _of_rank(site: SiteWeights, place: int, x: Tensor) -> Tensor:
    part = site.parts[place]
    assert part.b.shape[0] == part.outputs.stop - part.outputs.start
    return part.scale * (x @ site.a[part.rows].T @ part.b.T)


def _joined(runs: list[Tensor], width: int) -> Tensor:
    """Runs of outputs in order; neighbors have the same one where there are more ranks than KV heads."""
    repeated = sum(run.shape[1] for run in runs) // width
    return torch.cat(runs[::repeated], dim=1)


def test_outputs_of_a_site_have_the_order_of_its_projections(tmp_path: Path, base: ModelConfig) -> None:
    weights = loaded(write_adapter(tmp_path, MODEL, modules=["v_proj"]), base)
    [part] = weights.sites[0, Site.QKV].parts
    query, kv = base.num_heads * base.head_dim, base.num_kv_heads * base.head_dim
    assert part.outputs == slice(query + kv, query + 2 * kv)


@pytest.mark.parametrize(
    ("value", "dtype"), [(torch.nan, torch.float32), (torch.inf, torch.float32), (1e6, torch.float16)]
)
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, base: ModelConfig, value: float, dtype: torch.dtype
) -> None:
    folder = write_adapter(tmp_path, MODEL)
    tensors, fields = read_files(folder)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = value
    write_files(folder, tensors, fields)
    with pytest.raises(CheckpointError, match="holds NaN or infinity as float"):
        loaded(folder, base, dtype=dtype)


def test_ranks_that_read_different_files_are_refused(tmp_path: Path, base: ModelConfig) -> None:
    folders = [write_adapter(tmp_path / str(seed), MODEL, seed=seed) for seed in (1, 2)]

    def load(parallel: Parallel) -> str:
        config = AdapterConfig.of({"same": folders[0], "sql": folders[parallel.rank]})
        read = LoadedAdapters.load(config, base, dtype=torch.float32, device="cpu", group=parallel.forward)
        with pytest.raises(CheckpointError) as caught:
            require_same_content(read.names, Agreement(parallel.forward).least)
        return str(caught.value)

    assert on_ranks(2, load) == ["adapter 'sql': its files changed while they were read; load it again"] * 2


@pytest.mark.parametrize(
    ("folder", "root"),
    [
        ("models--org--sql/snapshots/c0ffee", "org/sql@c0ffee"),
        ("home/snapshots/sql", "sql"),
        ("models--org--sql/v1/sql", "sql"),
    ],
)
def test_root_is_the_folder_or_the_commit_of_a_repository(
    tmp_path: Path, base: ModelConfig, folder: str, root: str
) -> None:
    config = AdapterConfig.of({"sql": write_adapter(tmp_path / folder, MODEL, modules=["q_proj"], layers=[0])})
    loaded = LoadedAdapters.load(config, base, dtype=torch.float32, device="cpu", group=SingleRank())
    assert [each.root for each in loaded.served] == [root]


def test_adapters_for_a_device_are_refused(tmp_path: Path, base: ModelConfig) -> None:
    config = AdapterConfig.of({"sql": tmp_path})
    with pytest.raises(ConfigError, match="adapters are computed on a CPU only, got --device cuda"):
        LoadedAdapters.load(config, base, dtype=torch.float32, device="cuda", group=SingleRank())
