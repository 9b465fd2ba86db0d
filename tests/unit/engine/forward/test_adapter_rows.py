"""Rows of adapters in a step: by token, and by what is wanted after the last layer."""

from collections.abc import Sequence

import numpy as np

from tandem_engine.forward.adapter_rows import NO_ADAPTER, AdapterRows, SlotRows
from tandem_engine.forward.batch import wanted_tokens
from tandem_testing.forward_builders import PageDealer, Seq, make_batch, make_pool


def sequences(*extends: int, decodes: int = 0, samples: Sequence[int] = ()) -> list[Seq]:
    dealer = PageDealer(pool=make_pool())
    made = [dealer.seq(20 + length, length) for length in extends] + [dealer.decode(9) for _ in range(decodes)]
    return [Seq(**{**_fields(seq), "samples": index not in samples}) for index, seq in enumerate(made)]


def _fields(seq: Seq) -> dict[str, object]:
    return {"seq_len": seq.seq_len, "extend_len": seq.extend_len, "decode": seq.decode, "pages": seq.pages}


def rows(made: Sequence[Seq], *slots: int) -> AdapterRows | None:
    batch = make_batch(made)
    return AdapterRows.of(np.array(slots), lens=batch.extend_lens, wanted=wanted_tokens(batch))


def listed(entries: Sequence[SlotRows]) -> dict[int, list[int] | slice]:
    return {slot: indices if isinstance(indices, slice) else indices.tolist() for slot, indices in entries}


def test_step_without_adapters_has_no_rows() -> None:
    assert rows(sequences(3, decodes=2), NO_ADAPTER, NO_ADAPTER, NO_ADAPTER) is None


def test_tokens_belong_to_the_slot_of_their_sequence() -> None:
    made = rows(sequences(3, 2, decodes=2), 1, NO_ADAPTER, 0, 1)
    assert made is not None
    assert listed(made.tokens) == {0: slice(5, 6), 1: [0, 1, 2, 6]}


def test_wanted_rows_count_among_the_wanted() -> None:
    step = sequences(3, 2, 4, decodes=1, samples=[1])
    made = rows(step, 1, 1, NO_ADAPTER, 0)
    assert made is not None
    assert wanted_tokens(make_batch(step)).tolist() == [2, 8, 9]
    assert listed(made.wanted) == {0: slice(2, 3), 1: slice(0, 1)}


def test_adjacent_rows_are_a_range() -> None:
    made = rows(sequences(3, 2, decodes=3), 4, 4, 7, NO_ADAPTER, 7)
    assert made is not None
    assert listed(made.tokens) == {4: slice(0, 5), 7: [5, 7]}
    assert listed(made.wanted) == {4: slice(0, 2), 7: [2, 4]}


def test_decodes_use_rows_of_their_tokens() -> None:
    made = rows(sequences(decodes=4), 1, NO_ADAPTER, 0, 1)
    assert made is not None
    assert listed(made.wanted) == listed(made.tokens) == {0: slice(2, 3), 1: [0, 3]}


def test_adapted_chunk_without_a_sample_has_no_rows() -> None:
    made = rows(sequences(3, decodes=1, samples=[0]), 2, NO_ADAPTER)
    assert made is not None
    assert (listed(made.tokens), listed(made.wanted)) == ({2: slice(0, 3)}, {})


def test_step_of_one_chunk_has_no_rows() -> None:
    made = rows(sequences(3, samples=[0]), 2)
    assert made is not None
    assert (listed(made.tokens), made.wanted) == ({2: slice(0, 3)}, ())


def test_all_tokens_wanted_have_the_rows_of_the_step() -> None:
    made = rows(sequences(3, decodes=1), 2, NO_ADAPTER)
    assert made is not None
    assert made.with_all_wanted().wanted == made.tokens
