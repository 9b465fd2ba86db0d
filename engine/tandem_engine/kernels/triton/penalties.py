"""Edits of logits that touch a whole row, in one pass: penalties, the mask of a grammar, the tokens a client allows.

    repetition   logit > 0 ? logit / r : logit · r     tokens of prompt and output
    frequency    logit − f · count                      tokens of the output
    presence     logit − p                              tokens of the output
    grammar      −inf where the bit of the token is clear, and for tokens beyond the bits
    allowed      −inf where the byte of the token is 0

in this order, as `sampling.logits_processor` has it. A count is what the row's slot has counted, and how often the
token stands among the drafts before the row (`ahead`). Divisions are IEEE's and nothing is contracted, so the results
have the bits of `sampling.logits_processor`.

Shapes: logits [S, V] float32 to an edited copy, rows dense. `slots`, `masks` and `allows` [S] int64 say which row of
`counts` [C, V] int32 and `in_prompt` [C, V] bool, of `bits` [G, words] int32 and of `allowed` [A, V] bool belongs to
each row, −1 for none: rows without edits are copied. Bit t % 32 of word t // 32 is token t's.

Tiling: program (s, i) has BLOCK logits of row s. A penalized row reads 9 bytes for each logit and writes 4; the CPU's
lists of seen tokens would save most of that and need a host that knows how long they are.

Source: Keskar et al., CTRL, 2019 (repetition); OpenAI's API reference (frequency, presence).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Logits of a program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPenalties:
    """Of all S rows of a step."""

    slots: Tensor
    """[S] int64, −1 for rows without a penalty."""
    repetition: Tensor
    """[S] float32; so are the others."""
    frequency: Tensor
    presence: Tensor
    counts: Tensor
    """[C, V] int32"""
    in_prompt: Tensor
    """[C, V] bool"""
    ahead: Tensor | None = None
    """[S, K] int64 tokens before each row in addition to those counted, −1 for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowMasks:
    """What rows may choose from."""

    index: Tensor
    """[S] int64 which mask is each row's, −1 for none."""
    masks: Tensor
    """[G, words] int32 of bits, or [A, V] bool."""


@triton.jit(do_not_specialize=["num_words", "drafts"])
def edit_kernel(
    logits,
    out,
    slots,
    repetition,
    frequency,
    presence,
    counts,
    in_prompt,
    ahead,
    bit_index,
    bits,
    allowed_index,
    allowed,
    row_stride,
    vocab_size,
    num_words,
    drafts,
    PENALIZE: tl.constexpr,
    MASK: tl.constexpr,
    ALLOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[s, t] = the edited logits[s, t]"""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    logit = tl.load(logits + row * row_stride + token, mask=live, other=0.0)
    if PENALIZE:
        slot = tl.load(slots + row)
        if slot >= 0:
            place = slot * vocab_size + token
            count = tl.load(counts + place, mask=live, other=0)
            prompt = tl.load(in_prompt + place, mask=live, other=0) != 0
            for draft in range(drafts):
                count += (tl.load(ahead + row * drafts + draft) == token).to(tl.int32)
            strength = tl.load(repetition + row)
            known = prompt | (count > 0)
            repeated = tl.where(logit > 0, tl.math.div_rn(logit, strength), logit * strength)
            logit = tl.where(known, repeated, logit)
            logit = logit - tl.load(frequency + row) * count.to(tl.float32)
            logit = logit - tl.load(presence + row) * (count > 0).to(tl.float32)
    if MASK:
        mask = tl.load(bit_index + row)
        if mask >= 0:
            word = token // 32
            packed = tl.load(bits + mask * num_words + word, mask=word < num_words, other=0)
            logit = tl.where((packed >> (token % 32)) & 1 != 0, logit, float("-inf"))
    if ALLOW:
        mask = tl.load(allowed_index + row)
        if mask >= 0:
            allow = tl.load(allowed + mask * vocab_size + token, mask=live, other=0) != 0
            logit = tl.where(allow, logit, float("-inf"))
    tl.store(out + row * vocab_size + token, logit, mask=live)


def edit_logits(
    logits: Tensor,
    penalties: RowPenalties | None = None,
    *,
    bits: RowMasks | None = None,
    allowed: RowMasks | None = None,
) -> Tensor:
    """A copy of `logits` [S, V] float32, edited; see the module."""
    rows, vocab_size = logits.shape
    out = torch.empty((rows, vocab_size), dtype=torch.float32, device=logits.device)
    if not rows:
        return out
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    constants = edit_constants(penalize=penalties is not None, mask=bits is not None, allow=allowed is not None)
    tables, drafts = ((logits,) * 7, 0) if penalties is None else _tables(penalties)
    edit_kernel[(rows, triton.cdiv(vocab_size, BLOCK))](
        logits, out, *tables,
        *((logits, logits) if bits is None else (bits.index, bits.masks)),
        *((logits, logits) if allowed is None else (allowed.index, _bytes(allowed.masks))),
        logits.stride(0), vocab_size, 0 if bits is None else bits.masks.shape[1], drafts,
        **constants, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def edit_constants(*, penalize: bool, mask: bool, allow: bool) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {"PENALIZE": penalize, "MASK": mask, "ALLOW": allow, "BLOCK": BLOCK}


def _tables(penalties: RowPenalties) -> tuple[tuple[Tensor, ...], int]:
    """What the kernel reads of penalties, and how many drafts each row has at most: with none it is the same kernel."""
    ahead = penalties.ahead
    tables = (
        penalties.slots, penalties.repetition, penalties.frequency, penalties.presence, penalties.counts,
        _bytes(penalties.in_prompt), penalties.slots if ahead is None else ahead.contiguous(),
    )  # fmt: skip
    return tables, 0 if ahead is None else ahead.shape[1]


def _bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)
