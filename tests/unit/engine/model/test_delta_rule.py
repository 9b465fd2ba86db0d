"""The gated delta rule: two forms of one recurrence, and the convolution before it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tandem_engine.model.layers.delta_rule import (
    CHUNK,
    MIN_TOGETHER,
    causal_conv,
    chunks_together,
    next_token,
    prompt,
    unit_heads,
)

HEADS, KEY, VALUE = 3, 8, 5


def drawn(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, keys, values, decays, betas and a state to begin with."""
    draw = torch.Generator().manual_seed(length)
    query, key = (unit_heads(torch.randn(length, 1, KEY, generator=draw, dtype=dtype), HEADS) for _ in range(2))
    value = torch.randn(length, HEADS, VALUE, generator=draw, dtype=dtype)
    decay = -torch.rand(length, HEADS, generator=draw, dtype=dtype)
    beta = torch.rand(length, HEADS, generator=draw, dtype=dtype)
    return query, key, value, decay, beta, torch.randn(HEADS, KEY, VALUE, generator=draw, dtype=dtype)


def by_token(*tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As the definition has it."""
    outputs = []
    for query, key, value, decay, beta in zip(*tokens, strict=True):
        state = state * decay.exp()[:, None, None]
        change = (value - (state * key[..., None]).sum(1)) * beta[:, None]
        state = state + key[..., None] * change[:, None]
        outputs.append((state * query[..., None]).sum(1))
    return torch.stack(outputs), state


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_run_in_chunks_is_the_recurrence(length, dtype):
    *tokens, state = drawn(length, dtype)
    outputs, [after] = prompt(*tokens, state)
    expected, last = by_token(*tokens, state=state)
    atol = 1e-5 if dtype is torch.float32 else 1e-13
    torch.testing.assert_close(outputs, expected, atol=atol, rtol=0)
    torch.testing.assert_close(after, last, atol=atol, rtol=0)


def test_run_cut_at_chunks_has_the_bits_of_the_whole():
    *tokens, state = drawn(3 * CHUNK + 7)
    outputs, [after] = prompt(*tokens, state)
    parts, start = [], 0
    for stop in (CHUNK, 3 * CHUNK, len(outputs)):
        part, [state] = prompt(*(each[start:stop] for each in tokens), state)
        parts.append(part)
        start = stop
    assert torch.equal(torch.cat(parts), outputs)
    assert torch.equal(state, after)


@pytest.mark.parametrize("kept", [(CHUNK,), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 7)])
def test_states_kept_within_a_run_are_those_of_shorter_runs(kept):
    *tokens, state = drawn(2 * CHUNK + 7)
    _, states = prompt(*tokens, state, kept=kept)
    assert len(states) == len(kept) + 1
    for length, found in zip((*kept, 2 * CHUNK + 7), states, strict=True):
        _, [expected] = prompt(*(each[:length] for each in tokens), state)
        assert torch.equal(found, expected)


def test_next_token_changes_the_states_of_its_sequences():
    *tokens, state = drawn(4)
    states = torch.stack([state * factor for factor in range(4)])
    expected = [by_token(*(each[row : row + 1] for each in tokens), state=states[row].clone()) for row in range(4)]
    outputs = next_token(*tokens, states)
    torch.testing.assert_close(outputs, torch.cat([output for output, _ in expected]), atol=1e-6, rtol=0)
    torch.testing.assert_close(states, torch.stack([state for _, state in expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_sees_the_inputs_kept_before_it(taps):
    draw = torch.Generator().manual_seed(taps)
    inputs, weight = torch.randn(1, 20, 6, generator=draw), torch.randn(taps, 6, generator=draw)
    padded = F.pad(inputs.mT, (taps - 1, 0))
    expected = F.silu(F.conv1d(padded, weight.t()[:, None], groups=6)).mT
    nothing = torch.zeros(1, taps - 1, 6)
    first = causal_conv(nothing, inputs[:, :13], weight)
    history = torch.cat((nothing, inputs[:, :13]), 1)[:, -(taps - 1) :]
    torch.testing.assert_close(torch.cat((first, causal_conv(history, inputs[:, 13:], weight)), 1), expected)


@pytest.mark.parametrize(("chunks", "tokens", "sizes"), [(1, 1, [1]), (128, 8192, [128]), (257, 8192, [86, 86, 85])])
def test_chunks_computed_together_follow_from_tokens(chunks, tokens, sizes):
    parts = list(chunks_together(chunks, tokens=tokens))
    assert [part.stop - part.start for part in parts] == sizes
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(chunks))
    assert max(sizes) <= max(tokens // CHUNK, MIN_TOGETHER)
