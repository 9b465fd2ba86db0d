"""From edited logits to tokens, without a sort and without the host: the tokens of `sampling.sampler`, row by row.

    greedy     the largest logit, the lowest id among equals
    sampled    s = (logit − largest) / temperature
               the largest s + gumbel(seed, position, token) among the tokens that stay, the lowest id among equals

The tokens that stay are above the largest of three bounds: the k-th largest s; log(min_p); the last s of the shortest
run, from the largest down, whose probability reaches p.
    - The k-th largest is found by digits: 4 histograms of 256 bins of the magnitudes of s, none of which is positive.
    - top-p draws winners until one stays, without its bound: c stays when the mass above c, Σ e^s over s > c, is less
      than p times the mass of top-k. The first one fails with a probability below 1 − p; the next are drawn above it.

Three launches: peaks of parts of each row; winners of the parts and their mass; one program per row that settles, and
reads the row again only for filters. Nothing crosses rows, parts follow from the vocabulary's size, and masses are
summed in one order, so a row's token does not depend on its batch. Parts exchange values in shared tensors at addresses
that follow from the number of rows: no kernel is compiled for their alignment.

Noise, without a generator:
    key    = splitmix64's finalizer over seed · a + position · b              once a row
    bits   = murmur3's finalizer over (hash of token id, key)                 31 bits, equal to the CPU's
    gumbel = −log(−log(1 − u)),  u = (bits + ½) / 2³¹

Exactness: s and bits equal the CPU's. Libraries differ in logarithms, so these use IEEE additions and multiplications
alone, not contracted (`enable_fp_fusion=False`), equal on every device and within 2e-6 of the CPU's; e^s and its sums
are within 1e-6. The token is the CPU's unless two candidates are nearer than that. NaN or +infinity as best logit: −1.

Shapes: logits [S, V] float32, rows dense; temperature, top_p, min_p float32 [S], top_k, seed, position int64 [S].
Source: Gumbel, 1954 (the rule); FlashInfer's sorting-free sampling, 2025 (drawing again); Steele, Lea, Flood, Fast
splittable pseudorandom number generators, 2014; Appleby, MurmurHash3; Moshier, Cephes (polynomial of `natural_log`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
SEED_STEP = 0xD1342543DE82EF95
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

FMIX = (0x85EBCA6B, 0xC2B2AE35)
"""As `sampling.sampler` has them, unsigned."""

_GOLDEN, _SEED_STEP = tl.constexpr(GOLDEN), tl.constexpr(SEED_STEP)
_MIX1, _MIX2 = tl.constexpr(MIX[0]), tl.constexpr(MIX[1])
_FMIX1, _FMIX2 = tl.constexpr(FMIX[0]), tl.constexpr(FMIX[1])
_MAX_U = tl.constexpr(1.0 - 2.0**-24)
_HALF_STEP = tl.constexpr(2.0**-31)
_ROOT_HALF = tl.constexpr(0.70710678118654752)
_LN2_HIGH, _LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """uint64 of int64 seed and position."""
    return _mix64(seed.to(tl.uint64, bitcast=True) * _SEED_STEP + position.to(tl.uint64, bitcast=True) * _GOLDEN)


@triton.jit
def noise_bits(key, token):
    """int32 [0, 2³¹) of a row's key and non-negative token ids."""
    bits = _mix64(token.to(tl.uint64) + _GOLDEN).to(tl.uint32) ^ key.to(tl.uint32)
    bits = ((bits ^ (bits >> 16)) * _FMIX1) ^ (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 13)) * _FMIX2
    return ((bits ^ (bits >> 16)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _log_near_one(z, exponent):
    """log((1 + z) · 2^exponent) for 1 + z in [√½, √2]."""
    squared = z * z
    y = 7.0376836292e-2 * z - 1.1514610310e-1
    y = y * z + 1.1676998740e-1
    y = y * z - 1.2420140846e-1
    y = y * z + 1.4249322787e-1
    y = y * z - 1.6668057665e-1
    y = y * z + 2.0000714765e-1
    y = y * z - 2.4999993993e-1
    y = y * z + 3.3333331174e-1
    y = y * z * squared + exponent * _LN2_LOW - 0.5 * squared
    return z + y + exponent * _LN2_HIGH


@triton.jit
def _split(x):
    """Mantissa in [√½, √2) and exponent of a positive normal float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < _ROOT_HALF
    return tl.where(low, mantissa + mantissa, mantissa), tl.where(low, exponent - 1, exponent).to(tl.float32)


@triton.jit
def natural_log(x):
    """log of a positive normal float32."""
    mantissa, exponent = _split(x)
    return _log_near_one(mantissa - 1.0, exponent)


@triton.jit
def gumbel(bits):
    """float32 of 31 random bits, between −2.9 and 22.2."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * _HALF_STEP, _MAX_U)
    mantissa, exponent = _split(1.0 - u)
    # Near 1 the difference has lost what u still has.
    small = exponent == 0.0
    exponential = 0.0 - _log_near_one(tl.where(small, 0.0 - u, mantissa - 1.0), exponent)
    return 0.0 - natural_log(exponential)


PART = 4096
"""Logits of a program of `peak_kernel` and `draw_kernel`."""

BLOCK = 8192
"""Logits that `settle_kernel` reads together."""

WARPS = 8
SETTLE_WARPS = 16

CORRUPTED = -1
"""Stands for a token that means nothing, as in `sampling.sampler`."""

_UNSOUND = tl.constexpr(CORRUPTED)
_INFINITY = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _is_nan(values):
    return (values != values).to(tl.int32)  # noqa: PLR0124 - the one number that is not itself


@triton.jit
def _first_best(values, ids):
    """The largest value and the lowest id that has it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, _NO_TOKEN), axis=0)


@triton.jit
def _row_peak(peaks, peak_ids, row, num_parts, WIDTH: tl.constexpr):
    """The best logit of a row, its id, and whether the row means anything."""
    part = tl.arange(0, WIDTH)
    live = part < num_parts
    values = tl.load(peaks + row * num_parts + part, mask=live, other=-_INFINITY)
    unknown = tl.sum(_is_nan(values), axis=0)
    best, token = _first_best(values, tl.load(peak_ids + row * num_parts + part, mask=live, other=_NO_TOKEN))
    return best, token, (unknown == 0) & (best < _INFINITY)


@triton.jit
def _scaled(logit, largest, temperature):
    """`sampling.sampler._scale`"""
    return tl.math.div_rn(logit - tl.maximum(largest, _LOWEST), temperature)


@triton.jit
def _block(logits, token, live, largest, temperature):
    """s of a block of tokens, −inf for those beyond the vocabulary."""
    return _scaled(tl.load(logits + token, mask=live, other=-_INFINITY), largest, temperature)


@triton.jit(do_not_specialize_on_alignment=["peaks", "peak_ids"])
def peak_kernel(logits, peaks, peak_ids, row_stride, vocab_size, PART: tl.constexpr):
    """The best logit of part i of row s and its id; NaN if one is; program (s, i)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * row_stride + token, mask=token < vocab_size, other=-_INFINITY)
    best, best_id = _first_best(values, token)
    unknown = tl.sum(_is_nan(values), axis=0) > 0
    place = row * tl.num_programs(1) + part
    tl.store(peaks + place, tl.where(unknown, float("nan"), best))
    tl.store(peak_ids + place, best_id)


@triton.jit(do_not_specialize_on_alignment=["peaks", "peak_ids", "keys", "winners", "masses"])
def draw_kernel(
    logits,
    peaks,
    peak_ids,
    temperatures,
    seeds,
    positions,
    keys,
    winners,
    masses,
    row_stride,
    vocab_size,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
):
    """The best s + noise of part i of row s, whose it is, and Σ e^s of the part; nothing for greedy rows."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    largest, _, sound = _row_peak(peaks, peak_ids, row, tl.num_programs(1), WIDTH)
    if sound & (temperature > 0.0):
        token = part * PART + tl.arange(0, PART)
        live = token < vocab_size
        s = _block(logits + row * row_stride, token, live, largest, temperature)
        noise = gumbel(noise_bits(row_key(tl.load(seeds + row), tl.load(positions + row)), token))
        best, winner = _first_best(tl.where(live, noise + s, -_INFINITY), token)
        place = row * tl.num_programs(1) + part
        tl.store(keys + place, best)
        tl.store(winners + place, winner)
        tl.store(masses + place, tl.sum(tl.exp(s), axis=0))


@triton.jit
def _next_digit(
    logits,
    prefix,
    missing,
    largest,
    temperature,
    vocab_size,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One more digit of the wanted magnitude, and its place among the magnitudes that begin like that."""
    counts = tl.zeros((256,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        live = token < vocab_size
        s = _block(logits, token, live, largest, temperature)
        magnitude = s.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        alike = (magnitude >> (SHIFT + BITS)) == (prefix >> (SHIFT + BITS))
        counts += tl.histogram((magnitude >> SHIFT) & ((1 << BITS) - 1), 256, mask=live & alike)
    digit = tl.sum((tl.cumsum(counts, axis=0) < missing).to(tl.int32), axis=0)
    before = tl.sum(tl.where(tl.arange(0, 256) < digit, counts, 0), axis=0)
    return prefix | (digit << SHIFT), missing - before


@triton.jit
def _kth_largest(logits, k, largest, temperature, vocab_size, BLOCK: tl.constexpr):
    """The k-th largest s of a row of more than k: the k-th smallest magnitude, digit by digit."""
    prefix, missing = _next_digit(logits, 0, k, largest, temperature, vocab_size, 23, 8, BLOCK)
    prefix, missing = _next_digit(logits, prefix, missing, largest, temperature, vocab_size, 15, 8, BLOCK)
    prefix, missing = _next_digit(logits, prefix, missing, largest, temperature, vocab_size, 7, 8, BLOCK)
    prefix, missing = _next_digit(logits, prefix, missing, largest, temperature, vocab_size, 0, 7, BLOCK)
    return 0.0 - prefix.to(tl.float32, bitcast=True)


@triton.jit
def _above(s, bound, STRICT: tl.constexpr):
    if STRICT:
        return s > bound
    return s >= bound


@triton.jit
def _mass_above(logits, bound, largest, temperature, vocab_size, STRICT: tl.constexpr, BLOCK: tl.constexpr):
    """Σ e^s over the tokens above the bound, float64."""
    total = 0.0
    total = total.to(tl.float64)  # type: ignore[attr-defined]
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        s = _block(logits, token, token < vocab_size, largest, temperature)
        above = _above(s, bound, STRICT)
        if tl.sum(above.to(tl.int32), axis=0) > 0:
            total += tl.sum(tl.where(above, tl.exp(s), 0.0), axis=0).to(tl.float64)
    return total


@triton.jit
def _draw_above(logits, key, bound, largest, temperature, vocab_size, STRICT: tl.constexpr, BLOCK: tl.constexpr):
    """The winner among the tokens above the bound, the first token if there are none."""
    best, winner = -_INFINITY, 0
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        s = _block(logits, token, token < vocab_size, largest, temperature)
        above = _above(s, bound, STRICT)
        if tl.sum(above.to(tl.int32), axis=0) > 0:
            noise = gumbel(noise_bits(key, token))
            here, first = _first_best(tl.where(above, noise + s, -_INFINITY), token)
            winner = tl.where(here > best, first, winner)
            best = tl.maximum(here, best)
    return winner


@triton.jit(do_not_specialize_on_alignment=["peaks", "peak_ids", "keys", "winners", "masses"])
def settle_kernel(
    logits,
    peaks,
    peak_ids,
    temperatures,
    top_ks,
    top_ps,
    min_p_logs,
    seeds,
    positions,
    keys,
    winners,
    masses,
    out,
    row_stride,
    vocab_size,
    num_parts,
    GREEDY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of row s; program s. GREEDY: all rows are."""
    row = tl.program_id(0).to(tl.int64)
    largest, token, sound = _row_peak(peaks, peak_ids, row, num_parts, WIDTH)
    if not GREEDY:
        temperature = tl.load(temperatures + row)
        if sound & (temperature > 0.0):
            part = tl.arange(0, WIDTH)
            live = part < num_parts
            place = row * num_parts + part
            _, token = _first_best(
                tl.load(keys + place, mask=live, other=-_INFINITY), tl.load(winners + place, mask=live, other=_NO_TOKEN)
            )
            logits += row * row_stride
            key = row_key(tl.load(seeds + row), tl.load(positions + row))
            top_p = tl.load(top_ps + row)
            bound = tl.load(min_p_logs + row)
            limit = tl.load(top_ks + row).to(tl.int32)
            limited = (limit > 0) & (limit < vocab_size)
            mass = tl.sum(tl.load(masses + place, mask=live, other=0.0).to(tl.float64), axis=0)
            if limited:
                kth = _kth_largest(logits, limit, largest, temperature, vocab_size, BLOCK)
                bound = tl.maximum(bound, kth)
                if top_p < 1.0:
                    mass = _mass_above(logits, kth, largest, temperature, vocab_size, False, BLOCK)
            s = _scaled(tl.load(logits + token), largest, temperature)
            if s < bound:
                token = _draw_above(logits, key, bound, largest, temperature, vocab_size, False, BLOCK)
                s = _scaled(tl.load(logits + token), largest, temperature)
            if top_p < 1.0:
                wanted = top_p.to(tl.float64) * mass
                above = _mass_above(logits, s, largest, temperature, vocab_size, True, BLOCK)
                while (above >= wanted) & (above > 0.0):
                    token = _draw_above(logits, key, s, largest, temperature, vocab_size, True, BLOCK)
                    s = _scaled(tl.load(logits + token), largest, temperature)
                    above = _mass_above(logits, s, largest, temperature, vocab_size, True, BLOCK)
    tl.store(out + row, tl.where(sound, token, _UNSOUND).to(tl.int64))


@triton.jit
def logprob_kernel(
    logits,
    token_ids,
    temperatures,
    out,
    row_stride,
    vocab_size,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[s] = log_softmax(logits[s] / temperature)[token_ids[s]]; program s."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    highest = tl.full((BLOCK,), -_INFINITY, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(logits + token, mask=token < vocab_size, other=-_INFINITY))
    largest = tl.max(highest, axis=0)
    temperature = 1.0
    if SCALED:
        temperature = tl.load(temperatures + row)
        temperature = tl.where(temperature > 0.0, temperature, 1.0)
    mass = _mass_above(logits, -_INFINITY, largest, temperature, vocab_size, False, BLOCK)
    chosen = tl.load(token_ids + row)
    s = _scaled(tl.load(logits + tl.maximum(chosen, 0)), largest, temperature)
    tl.store(out + row, s - tl.log(mass.to(tl.float32)))


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    all_greedy: bool = False,
) -> Tensor:
    """Token ids [S] int64 of edited logits [S, V], `CORRUPTED` where the best logit is NaN or +infinity.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.
    """
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    assert (logits.dtype, logits.stride(1)) == (torch.float32, 1), f"{logits.dtype} of strides {logits.stride()}"
    parts = triton.cdiv(vocab_size, PART)
    width = triton.next_power_of_2(parts)
    peaks, keys, masses = torch.empty((3, rows, parts), dtype=torch.float32, device=logits.device)
    peak_ids, winners = torch.empty((2, rows, parts), dtype=torch.int32, device=logits.device)
    stride = logits.stride(0)
    peak_kernel[(rows, parts)](logits, peaks, peak_ids, stride, vocab_size, PART=PART, num_warps=WARPS)
    if not all_greedy:
        draw_kernel[(rows, parts)](
            logits, peaks, peak_ids, temperature, seed, position, keys, winners, masses, stride, vocab_size,
            WIDTH=width, PART=PART, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    settle_kernel[(rows,)](
        logits, peaks, peak_ids, temperature, top_k, top_p, min_p.log(), seed, position, keys, winners, masses, out,
        stride, vocab_size, parts,
        GREEDY=all_greedy, WIDTH=width, BLOCK=BLOCK, num_warps=SETTLE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def chosen_logprobs(logits: Tensor, token_ids: Tensor, temperature: Tensor | None = None) -> Tensor:
    """float32 [S] logprob of each row's token: raw, or after the temperatures [S], of which 0 counts as 1."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        logprob_kernel[(rows,)](
            logits, token_ids, logits if temperature is None else temperature, out, logits.stride(0), vocab_size,
            SCALED=temperature is not None, BLOCK=BLOCK, num_warps=SETTLE_WARPS,
        )  # fmt: skip
    return out
