"""Edits of logits, noise and sampling of kernels equal what a CPU does."""

from dataclasses import replace
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_engine.forward.batch import SamplingBatch, TokenMasks
from tandem_engine.forward.logit_edits import LogitEdits, Penalties, TokenSets
from tandem_engine.kernels.triton import penalties, sampling
from tandem_engine.kernels.triton import sampling as noise
from tandem_engine.sampling import sampler as cpu_noise
from tandem_engine.sampling import triton_sampler
from tandem_engine.sampling.device_sampler import QueuedSampler
from tandem_engine.sampling.logits_processor import LogitEditor, PenaltyRows, apply_masks
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.edit_builders import make_edits, make_request, settled
from tandem_testing.forward_builders import make_sampling
from tandem_testing.queued_sampling import PARAMS, both, random_sampling
from tandem_testing.queued_sampling import random_logits as random_step
from tandem_testing.triton_kernels.ahead_of_time import compile_kernel
from tandem_testing.triton_kernels.tensors import kernels_on, to_device

VOCAB = 9001
"""Several parts and blocks of every kernel, and none of them whole."""
QWEN_VOCAB = 151_936
INTS, FLOATS, BYTES = "*i64:16", "*fp32:16", "*u8:16"
MAX_NOISE_ERROR = 2e-6


def check_penalties_have_the_bits_of_a_cpu(device: str) -> None:
    penalties_agree(device, rows=5, vocab=1500)


def check_masks_forbid_what_a_cpu_forbids(device: str) -> None:
    logits = random_logits(4, 1100, device)
    bits = torch.randint(-(2**31), 2**31, (2, 34), generator=torch.Generator().manual_seed(2)).int()
    index = torch.tensor([1, -1, 0, -1], device=device)
    expected = logits.cpu()
    masks = TokenMasks(rows=(2, 0), bitmask=bits)
    masks.release()
    apply_masks(expected, masks)
    found = penalties.edit_logits(logits, bits=penalties.RowMasks(index=index, masks=bits.to(device)))
    assert torch.equal(found.cpu(), expected)
    allowed = torch.zeros(1, 1100, dtype=torch.bool, device=device)
    allowed[0, [3, 1099]] = True
    only = penalties.RowMasks(index=torch.tensor([-1, 0, -1, -1], device=device), masks=allowed)
    limited = penalties.edit_logits(logits, allowed=only)
    assert torch.equal(limited[1].isfinite(), allowed[0])
    assert torch.equal(limited[[0, 2, 3]], logits[[0, 2, 3]])


def check_edits_by_row_are_those_of_the_editor(device: str) -> None:
    """Penalties, grammars and allowed tokens of some rows of a step, each of others, as lists that name their rows."""
    logits = random_logits(6, 70, "cpu")
    draws = torch.Generator().manual_seed(6)
    counts, in_prompt = torch.zeros(3, 70, dtype=torch.int32), torch.zeros(3, 70, dtype=torch.bool)
    editor = LogitEditor()
    for slot in range(2):
        prompt, outputs = torch.randint(0, 70, (2, 9), generator=draws)
        editor.penalties.load(slot, prompt.tolist(), outputs.tolist(), vocab_size=70)
        counts[slot], in_prompt[slot, prompt] = torch.bincount(outputs, minlength=70), True
    asked = Penalties(
        index=torch.tensor([4, 1]), slots=torch.tensor([0, 1]), repetition=torch.tensor([1.3, 0.8]),
        frequency=torch.tensor([0.5, -0.2]), presence=torch.tensor([0.1, 0.4]),
    )  # fmt: skip
    allowed = TokenSets(index=torch.tensor([1, 1, 3]), token_ids=torch.tensor([60, 5, 69]))
    bits = torch.randint(-(2**31), 2**31, (2, 3), generator=draws).int()
    masks = TokenMasks(rows=(5, 4), bitmask=bits)
    masks.release()
    expected = editor.edit(logits, LogitEdits(penalties=asked, allowed=allowed), masks=masks)
    there = logits.to(device)
    found = triton_sampler.edit_rows(
        there,
        penalties=triton_sampler.penalties_by_row(
            to_device(asked, device), counts.to(device), in_prompt.to(device), there
        ),
        masks=(torch.tensor([5, 4], device=device), bits.to(device)),
        allowed=to_device(allowed, device),
    )
    assert torch.equal(found.cpu(), expected)


def check_noise_has_the_bits_of_a_cpu(device: str) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 5, 2**40, 7, 1])
    hashes = cpu_noise.token_hashes(torch.arange(5000))
    for seed, position in zip(seeds, positions, strict=True):
        bits, found = noise_of(seed, position, 5000, device)
        key = cpu_noise._mix64(seed * cpu_noise._SEED_STEP + position * cpu_noise._GOLDEN)
        expected = hashes ^ key.to(torch.int32)
        cpu_noise._scramble(expected, (key >> 32).to(torch.int32))
        assert torch.equal(bits.cpu(), expected & 0x7FFFFFFF)
        noise_on_cpu = cpu_noise.gumbel(seed[None], position[None], hashes)[0]
        assert (found.cpu() - noise_on_cpu).abs().max() <= MAX_NOISE_ERROR
        assert (found.cpu() - exact_gumbel(bits.cpu())).abs().max() <= MAX_NOISE_ERROR


def check_noise_of_extreme_bits(device: str) -> None:
    bits = torch.tensor([0, 1, 2, 2**24, 2**30, 2**31 - 1], dtype=torch.int32)
    out = torch.empty(6, device=device)
    _gumbel_kernel[(1,)](bits.to(device), out, 6, block=8, enable_fp_fusion=False)
    assert (out.cpu() - exact_gumbel(bits)).abs().max() <= MAX_NOISE_ERROR


def check_greedy_rows_take_the_first_of_equals(device: str) -> None:
    logits = random_logits(5, VOCAB, device)
    logits[0, [4200, 8999, 17]] = 50.0
    logits[1] = -torch.inf
    logits[2, 5000] = torch.nan
    logits[3, 8000] = torch.inf
    for all_greedy in (True, False):
        params = make_sampling(temperature=[0.0] * 5)
        found = sampled(logits, params, all_greedy=all_greedy)
        assert found[:4] == [17, 0, -1, -1]
        assert found[4] == int(logits[4].argmax())


def check_tokens_are_those_of_a_cpu(device: str) -> None:
    """With every filter alone and together, at several temperatures; and as they are without company."""
    sampling_agrees(device, vocab=VOCAB, repeats=1)


def check_rows_with_few_tokens_left(device: str) -> None:
    """Everything forbidden, one left, ties with the k-th, a top-p that only the best token has."""
    logits = torch.full((5, VOCAB), -torch.inf)
    logits[1, 8000] = 1.0
    logits[2, [10, 5000, 6000]] = 2.0
    logits[3:] = random_logits(2, VOCAB, "cpu")
    params = make_sampling(
        temperature=[1.0] * 5, top_k=[0, 3, 1, 0, 1], top_p=[0.5, 0.9, 1.0, 0.0, 0.3], seed=list(range(5))
    )  # fmt: skip
    found = sampled(logits.to(device), params)
    assert found == Sampler().sample(logits, params).token_ids.tolist()
    assert found[:2] == [0, 8000]
    assert found[2] in (10, 5000, 6000)
    assert found[3:] == logits[3:].argmax(dim=1).tolist()


def check_a_filter_leaves_what_it_should(device: str) -> None:
    """Drawn often, from few tokens: nothing else, and all of it."""
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -2.0, 0.5, 1.5]).expand(40, 8).contiguous().to(device)
    for filters, stays in (({"top_k": 3}, {0, 1, 2, 7}), ({"top_p": 0.8}, {0, 1, 2, 7}), ({"min_p": 0.4}, {0, 7})):
        columns = {name: [value] * 40 for name, value in filters.items()}
        params = make_sampling(temperature=[1.0] * 40, seed=[5] * 40, position=list(range(40)), **columns)
        assert set(sampled(logits, params)) == stays, filters


def check_logprobs_of_chosen_tokens(device: str) -> None:
    logits = random_logits(3, VOCAB, device)
    tokens = torch.tensor([3, 8999, 4100], device=device)
    temperatures = torch.tensor([0.5, 0.0, 2.0], device=device)
    raw = logits.double().log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
    assert (sampling.chosen_logprobs(logits, tokens) - raw).abs().max() <= 1e-5
    scaled = logits.double() / temperatures.where(temperatures > 0, 1.0)[:, None]
    expected = scaled.log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
    assert (sampling.chosen_logprobs(logits, tokens, temperatures) - expected).abs().max() <= 1e-5


def check_a_queued_sampler_of_kernels_is_the_sampler(device: str) -> None:
    """Step after step, with every edit, and under the masks of grammars."""
    with kernels_on(device):
        host, queued = Sampler(), QueuedSampler()
        requests = [make_request(row + 1, params, outputs=[3, 9]) for row, params in enumerate(PARAMS)]
        edits = make_edits(requests)
        for seed in (1, 2, 3):
            suppress = ((), (4, 5), (), (), (), (1,))
            both(random_step(seed), random_sampling(seed, edits=edits, suppress=suppress), host, queued, device=device)
            edits = settled(edits)
        masks = TokenMasks.open((1, 4), 9)
        masks.bitmask.copy_(torch.randint(-(2**31), 2**31, (2, 9), generator=torch.Generator().manual_seed(1)))
        masks.release()
        both(random_step(4), random_sampling(4, masks=masks), Sampler(), QueuedSampler(), device=device)


def penalties_agree(device: str, *, rows: int, vocab: int) -> None:
    """With drafts before rows and without, beside a row without penalties."""
    draws = torch.Generator().manual_seed(4)
    logits = random_logits(rows + 1, vocab, "cpu")
    counted = PenaltyRows()
    counts = torch.zeros(rows, vocab, dtype=torch.int32)
    in_prompt = torch.zeros(rows, vocab, dtype=torch.bool)
    for slot in range(rows):
        prompt, outputs = torch.randint(0, vocab, (2, 40), generator=draws)
        counted.load(slot, prompt.tolist(), outputs.tolist(), vocab_size=vocab)
        counts[slot] = torch.bincount(outputs, minlength=vocab)
        in_prompt[slot, prompt] = True
    slots = torch.randperm(rows, generator=draws)
    repetition, frequency, presence = torch.rand(3, rows, generator=draws) * 1.5 + 0.3
    ahead = torch.randint(-1, vocab, (rows + 1, 3), generator=draws)
    ahead[:, 0] = counts.argmax(dim=1)[0]
    for drafts in (None, ahead):
        expected = logits.clone()
        asked = Penalties(
            index=torch.arange(rows), slots=slots, repetition=repetition, frequency=frequency, presence=presence
        )
        counted.apply(expected, asked, drafts)
        none = torch.zeros(1)
        found = penalties.edit_logits(
            logits.to(device),
            penalties.RowPenalties(
                slots=torch.cat((slots, torch.tensor([-1]))).to(device),
                repetition=torch.cat((repetition, none)).to(device),
                frequency=torch.cat((frequency, none)).to(device),
                presence=torch.cat((presence, none)).to(device),
                counts=counts.to(device),
                in_prompt=in_prompt.to(device),
                ahead=None if drafts is None else drafts.to(device),
            ),
        )
        assert torch.equal(found.cpu(), expected)


def sampling_agrees(device: str, *, vocab: int, repeats: int) -> None:
    filters = list(product((0, 1, 20), (1.0, 0.9, 0.3), (0.0, 0.05)))
    rows = len(filters) * repeats
    # As peaked as a model's, and nearly flat, where many candidates fail.
    logits = random_logits(rows, vocab, "cpu") * torch.tensor([3.0, 0.5, 4.0, 1.0, 0.1] * rows)[:rows, None]
    top_k, top_p, min_p = zip(*(filters * repeats), strict=True)
    params = make_sampling(
        temperature=[(0.7, 1.0, 1.3)[row % 3] for row in range(rows)],
        top_k=list(top_k),
        top_p=list(top_p),
        min_p=list(min_p),
        seed=list(range(rows)),
        position=[row * 7 for row in range(rows)],
    )
    expected = Sampler().sample(logits, params).token_ids.tolist()
    found = sampled(logits.to(device), params)
    assert found == expected
    last = rows - 1
    alone = make_sampling(
        temperature=[float(params.temperature[last])], top_k=[top_k[last]], top_p=[top_p[last]], min_p=[min_p[last]],
        seed=[last], position=[last * 7],
    )  # fmt: skip
    assert sampled(logits[last:].to(device), alone) == found[last:]


def random_logits(rows: int, vocab: int, device: str) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 2).to(device)


def sampled(logits: Tensor, params: SamplingBatch, *, all_greedy: bool = False) -> list[int]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    columns = {name: getattr(params, name).to(logits.device) for name in names}
    return triton_sampler.sample_rows(logits, replace(params, all_greedy=all_greedy, **columns)).tolist()


@triton.jit
def _noise_kernel(seed, position, bits, out, count, block: tl.constexpr):
    token = tl.arange(0, block)
    drawn = noise.noise_bits(noise.row_key(tl.load(seed), tl.load(position)), token)
    tl.store(bits + token, drawn, mask=token < count)
    tl.store(out + token, noise.gumbel(drawn), mask=token < count)


@triton.jit
def _gumbel_kernel(bits, out, count, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(out + i, noise.gumbel(tl.load(bits + i, mask=i < count, other=0)), mask=i < count)


def noise_of(seed: Tensor, position: Tensor, count: int, device: str) -> tuple[Tensor, Tensor]:
    bits, out = torch.empty(count, dtype=torch.int32, device=device), torch.empty(count, device=device)
    _noise_kernel[(1,)](
        seed[None].to(device), position[None].to(device), bits, out, count, block=triton.next_power_of_2(count),
        enable_fp_fusion=False,
    )  # fmt: skip
    return bits, out


def exact_gumbel(bits: Tensor) -> Tensor:
    """float64, of the u that float32 has for `bits`."""
    u = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-u))


def compile_edits(arch: int) -> None:
    tensors = (
        dict.fromkeys(("logits", "out", "repetition", "frequency", "presence"), FLOATS)
        | dict.fromkeys(("slots", "ahead", "bit_index", "allowed_index"), INTS)
        | dict.fromkeys(("counts", "bits"), "*i32:16")
        | dict.fromkeys(("in_prompt", "allowed"), BYTES)
        | {"row_stride": "i32:16", "vocab_size": "i32:16", "num_words": "i32", "drafts": "i32"}
    )
    constants = penalties.edit_constants(penalize=True, mask=True, allow=True)
    compile_kernel(
        penalties.edit_kernel, tensors, constants, arch=arch, enable_fp_fusion=False
    ).assert_fits()  # fmt: skip


def compile_sampling(arch: int) -> None:
    parts = triton.cdiv(QWEN_VOCAB, sampling.PART)
    width = triton.next_power_of_2(parts)
    sizes = {"row_stride": "i32:16", "vocab_size": "i32:16"}
    peaks = {"logits": FLOATS, "peaks": "*fp32", "peak_ids": "*i32"}
    params = {
        "temperatures": FLOATS, "seeds": INTS, "positions": INTS, "keys": "*fp32", "winners": "*i32", "masses": "*fp32",
    }  # fmt: skip
    settled = {"top_ks": INTS, "top_ps": FLOATS, "min_p_logs": FLOATS, "out": INTS, "num_parts": "i32"}
    compile_kernel(
        sampling.peak_kernel, peaks | sizes, {"PART": sampling.PART}, arch=arch, num_warps=sampling.WARPS
    ).assert_fits()
    compile_kernel(
        sampling.draw_kernel, peaks | params | sizes, {"WIDTH": width, "PART": sampling.PART}, arch=arch,
        num_warps=sampling.WARPS, enable_fp_fusion=False,
    ).assert_fits()  # fmt: skip
    for greedy in (False, True):
        compile_kernel(
            sampling.settle_kernel, peaks | params | settled | sizes,
            {"GREEDY": greedy, "WIDTH": width, "BLOCK": sampling.BLOCK}, arch=arch,
            num_warps=sampling.SETTLE_WARPS, enable_fp_fusion=False,
        ).assert_fits()  # fmt: skip
    logprob = {"logits": FLOATS, "token_ids": INTS, "temperatures": FLOATS, "out": FLOATS}
    compile_kernel(
        sampling.logprob_kernel, logprob | sizes, {"SCALED": True, "BLOCK": sampling.BLOCK}, arch=arch,
        num_warps=sampling.SETTLE_WARPS,
    ).assert_fits()  # fmt: skip
