"""Every rank reads its part of a checkpoint, and together they compute what one rank would."""

import dataclasses

import pytest
import torch

from tandem_engine.base.errors import ConfigError
from tandem_engine.config import ModelImpl, MoeConfig
from tandem_engine.model.checkpoint import parse_config
from tandem_engine.model.checkpoint_files import open_tensors
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.model.layers.linear import DenseTable, Linear, RowParallel, VocabularyEmbedding, VocabularyHead
from tandem_engine.model.loader import WeightReader
from tandem_engine.model.weights import Heads, heads_of_rank, require_shareable, row_parallel
from tandem_engine.parallel.group import Parallel, SingleRank
from tandem_engine.parallel.sharding import INPUTS, OUTPUTS, VOCABULARY, Split
from tandem_testing.checkpoint_files import write_checkpoint, write_config
from tandem_testing.rank_threads import on_ranks

HEAD_DIM = 4
Q, K = (f"model.layers.0.self_attn.{part}_proj.weight" for part in ("q", "k"))
GATE, UP, DOWN = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def tensors(tmp_path) -> dict[str, torch.Tensor]:
    return write_checkpoint(tmp_path, attention_bias=True)


def reader(path, group=None) -> WeightReader:
    return WeightReader(
        tensors=open_tensors(open_directory(path)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        advance=lambda _: None,
        group=group or SingleRank(),
    )


def parts(path, *names: str, split: Split, size: int) -> list[torch.Tensor]:
    """What each of `size` ranks reads. Reading needs no other rank."""
    return [reader(path, SingleRank(rank=rank, size=size)).stacked(*names, split=split) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "split"), [(GATE, OUTPUTS), (DOWN, INPUTS), (Q, Split(dim=0, unit=HEAD_DIM))])
def test_parts_of_all_ranks_are_the_tensor(tensors, tmp_path, name, split, size):
    assert torch.equal(torch.cat(parts(tmp_path, name, split=split, size=size), dim=split.dim), tensors[name])


def test_stacked_projections_are_split_one_by_one(tensors, tmp_path):
    first, second = parts(tmp_path, GATE, UP, split=OUTPUTS, size=2)
    assert torch.equal(first, torch.cat((tensors[GATE][:12], tensors[UP][:12])))
    assert torch.equal(second, torch.cat((tensors[GATE][12:], tensors[UP][12:])))


def test_kv_heads_are_replicated_if_fewer_than_ranks(tensors, tmp_path):
    ranks = parts(tmp_path, Q, K, split=Split(dim=0, unit=HEAD_DIM), size=4)
    for rank, part in enumerate(ranks):
        query, kv = tensors[Q][rank * 4 : rank * 4 + 4], tensors[K][rank // 2 * 4 : rank // 2 * 4 + 4]
        assert torch.equal(part, torch.cat((query, kv)))


def test_vocabulary_that_does_not_divide_ends_in_zero_rows(tensors, tmp_path):
    whole = torch.cat(parts(tmp_path, TABLE, split=VOCABULARY, size=3))
    assert whole.shape == (21, 16)
    assert torch.equal(whole[:20], tensors[TABLE])
    assert not whole[20:].any()


def test_rank_with_only_padding_vocabulary_loads(tmp_path):
    write_checkpoint(tmp_path, vocab_size=5)
    assert [len(part) for part in parts(tmp_path, TABLE, split=VOCABULARY, size=4)] == [2, 2, 2, 2]


def test_bias_after_split_inputs_is_added_once(tensors, tmp_path):
    name = "model.layers.0.self_attn.o_proj"
    x = torch.randn(3, 16)

    def work(parallel: Parallel) -> torch.Tensor:
        layer = row_parallel(reader(tmp_path, parallel.forward), name, bias=True, split=Split(dim=1, unit=HEAD_DIM))
        return layer(x.chunk(2, dim=1)[parallel.rank])

    expected = torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
    for result in on_ranks(2, work):
        torch.testing.assert_close(result, expected)


def test_partial_products_of_all_ranks_add_up():
    weight, x = torch.randn(6, 8), torch.randn(5, 8)

    def work(parallel: Parallel) -> torch.Tensor:
        local = Linear(weight=weight.chunk(4, dim=1)[parallel.rank], bias=None)
        return RowParallel(local=local, group=parallel.forward)(x.chunk(4, dim=1)[parallel.rank])

    first, *others = on_ranks(4, work)
    torch.testing.assert_close(first, x @ weight.T)
    assert all(torch.equal(first, other) for other in others)


def test_padded_vocabulary_shards_match_whole_table():
    table, ids, hidden = torch.randn(7, 4), torch.tensor([6, 0, 3, 3, 4]), torch.randn(3, 4)
    padded = torch.cat((table, torch.zeros(2, 4)))

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        share = padded.chunk(3)[parallel.rank]
        embedding = VocabularyEmbedding(table=DenseTable(weight=share), start=parallel.rank * 3, group=parallel.forward)
        head = VocabularyHead(local=Linear(weight=share, bias=None), vocab_size=7, group=parallel.forward)
        return embedding(ids), head(hidden)

    for rows, logits in on_ranks(3, work):
        assert torch.equal(rows, table[ids])
        torch.testing.assert_close(logits, hidden @ table.T)
        assert logits.is_contiguous()


def config(tmp_path, **changes: int):
    return parse_config(open_directory(write_config(tmp_path, **changes)))


def test_heads_are_divided_and_few_kv_heads_repeated(tmp_path):
    model = config(tmp_path, hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    assert [heads_of_rank(model, size) for size in (1, 2, 4, 8)] == [Heads(8, 2), Heads(4, 1), Heads(2, 1), Heads(1, 1)]


@pytest.mark.parametrize(
    ("changes", "size", "error_message"),
    [
        ({}, 3, "does not divide the 4 attention heads; it can be 1, 2, 4"),
        ({}, 8, "does not divide the 4 attention heads"),
        ({"intermediate_size": 25}, 2, "does not divide the intermediate size of 25; it can be 1"),
    ],
)
def test_size_that_cannot_work_is_refused_with_those_that_can(tmp_path, changes, size, error_message):
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} does not fit this model: it {error_message}"):
        require_shareable(config(tmp_path, **changes), size)


def test_mixture_is_shared_by_the_inner_size_of_its_experts(tmp_path):
    moe = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=6, normalize=True)
    model = dataclasses.replace(config(tmp_path), intermediate_size=25, moe=moe)
    require_shareable(model, 2)
    with pytest.raises(ConfigError, match="does not divide the intermediate size of 6"):
        require_shareable(model, 4)
    with pytest.raises(ConfigError, match="does not divide the intermediate size of 25"):
        require_shareable(dataclasses.replace(model, moe=dataclasses.replace(moe, dense_layers=(0,))), 2)


def test_model_of_transformers_is_not_shared(tmp_path):
    model = dataclasses.replace(config(tmp_path), impl=ModelImpl.TRANSFORMERS)
    require_shareable(model, 1)
    with pytest.raises(ConfigError, match="code of transformers computes it, which cannot be shared; it can be 1"):
        require_shareable(model, 2)


def test_kv_heads_incompatible_with_tp_size_are_rejected(tmp_path):
    model = dataclasses.replace(config(tmp_path), num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match="is not a divisor or a multiple of the 6 KV heads; it can be 1, 2, 3, 6, 12"):
        require_shareable(model, 4)
