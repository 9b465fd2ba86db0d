"""`TritonBackend` as the executor has it: against the reference over the same pool, and as CUDA graphs want it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from tandem_engine.forward.prompt_shape import PromptShape, as_prompt
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.prompt_choice import PromptChooser
from tandem_engine.model.attention.prompt_libraries import DenseAttend, Library, Supports
from tandem_engine.model.attention.reference import TorchReferenceBackend, attend_dense
from tandem_engine.model.attention.triton import TritonBackend
from tandem_testing.forward_builders import HEAD_DIM, NUM_HEADS, PLAIN, PageDealer, Seq, make_batch, make_pool, make_qkv
from tandem_testing.triton_kernels.ahead_of_time import launches_that_only_compile
from tandem_testing.triton_kernels.checks import HOPPER

SCALE = HEAD_DIM**-0.5
SPECS = (AttentionSpec(scale=SCALE, window=20), AttentionSpec(scale=0.6, soft_cap=2.0))
"""A layer with a window, and one that caps."""
RANK, WIDTH = 24, 40
LATENT = (AttentionSpec(scale=WIDTH**-0.5, value_width=RANK),)
"""A layer over latents."""


def pools(device: str, **shape):
    """Two pools with the same in them: one for the reference, on the CPU."""
    here, there = make_pool(num_pages=140, **shape), make_pool(num_pages=140, **shape)
    there.data = there.data.to(device)
    there.scales = None if there.scales is None else there.scales.to(device)
    return here, there


def agrees(sequences, here, there, device: str, specs, *, max_queries: int = 1) -> None:
    batch = make_batch(sequences, page_size=here.page_size)
    specs_here = [replace(spec, sinks=None if spec.sinks is None else spec.sinks.cpu()) for spec in specs]
    reference = TorchReferenceBackend(here, specs=specs_here).plan(batch)
    plan = TritonBackend(there, num_heads=NUM_HEADS, specs=specs, max_queries=max_queries).plan(batch)
    for layer in range(len(specs)):
        qkv = make_qkv(batch.num_tokens, seed=layer)
        out = plan(layer, *(part.to(device) for part in qkv))
        torch.testing.assert_close(out.cpu(), reference(layer, *qkv), rtol=1e-5, atol=2e-5)
    assert torch.equal(there.data.cpu().view(torch.uint8), here.data.view(torch.uint8)), (
        "K and V of the step, and nothing else, is written"
    )


def check_prompts_chunks_and_decodes(device: str) -> None:
    for specs in (PLAIN, SPECS):
        here, there = pools(device)
        dealer = PageDealer(pool=here)
        prompts = [dealer.seq(20, 20), dealer.seq(150, 60), dealer.seq(21, 1)]
        decodes = [dealer.decode(seq_len) for seq_len in (1, 16, 17, 300)]
        agrees([*prompts, *decodes], here, there, device, specs)
    agrees(prompts, here, there, device, SPECS)
    agrees(decodes, here, there, device, SPECS)


def check_pages_of_one_token(device: str) -> None:
    here, there = pools(device, page_size=1)
    dealer = PageDealer(pool=here)
    agrees([dealer.seq(20, 11), dealer.decode(37)], here, there, device, PLAIN)


def check_float8_with_a_scale_for_each_head(device: str) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        here, there = pools(device, dtype=dtype)
        dealer = PageDealer(pool=here)
        agrees([dealer.seq(20, 20), dealer.seq(70, 30), dealer.decode(37)], here, there, device, SPECS)


def check_sinks_of_each_layer(device: str) -> None:
    specs = tuple(
        AttentionSpec(scale=SCALE, window=window, sinks=torch.linspace(low, 4.0, NUM_HEADS, device=device))
        for window, low in ((20, -3.0), (20, 2.0))
    )
    here, there = pools(device)
    dealer = PageDealer(pool=here)
    agrees([dealer.seq(150, 60), dealer.seq(21, 1), dealer.decode(300)], here, there, device, specs)


def check_drafts_behind_a_token(device: str) -> None:
    here, there = pools(device)
    dealer = PageDealer(pool=here)
    runs = [dealer.seq(40, 3), dealer.seq(40, 2), dealer.seq(33, 1), dealer.seq(90, 40)]
    agrees(runs, here, there, device, SPECS, max_queries=3)


def check_a_prompt_graph_over_float8_pages_gives_the_bits_of_a_plan(device: str) -> None:
    _, pool = pools(device, dtype=torch.float8_e4m3fn)
    dealer = PageDealer(pool=pool)
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=PLAIN, dtype=torch.float32)
    steps = [dealer.seq(30, 20), dealer.decode(70)], [dealer.seq(24, 24)]
    prompt_graph_is_a_plan(backend, PromptShape(tokens=24, rows=4, extends=3), steps, device, layers=1)


def check_a_graph_gives_the_bits_of_a_plan(device: str) -> None:
    """One graph for batches of any size up to its own, one after the other; its tensors stay where they are."""
    _, pool = pools(device)
    dealer = PageDealer(pool=pool)
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=SPECS)
    graph = backend.graph_plan(max_rows=4, max_pages=30)
    tensors = graph.page_table, graph.seq_lens, graph.slots
    places = [tensor.data_ptr() for tensor in tensors]
    for lengths in ((1, 40, 300, 17), (290, 5), (16,)):
        sequences = [dealer.decode(length) for length in lengths]
        batch = make_batch(sequences, page_size=pool.page_size)
        padded = [part.to(device) for part in make_qkv(4)]
        for layer in range(2):
            graph.load(batch)
            graph.prepare()
            out = graph(layer, *padded)
            plain = backend.plan(batch)(layer, *(part[: len(lengths)] for part in padded))
            assert torch.equal(out[: len(lengths)], plain), lengths
            assert torch.equal(out[len(lengths) :], torch.zeros_like(out[len(lengths) :])), "padding is zeros"
    assert [tensor.data_ptr() for tensor in tensors] == places


def check_a_prompt_graph_gives_the_bits_of_a_plan(device: str) -> None:
    """Of any step that is not larger: prompts, chunks and decodes, whatever was loaded before."""
    _, pool = pools(device)
    dealer = PageDealer(pool=pool)
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=SPECS)
    large = [dealer.seq(60, 60), dealer.seq(40, 3), dealer.decode(300), dealer.decode(17)]
    others = [dealer.seq(33, 1)], [dealer.seq(72, 72)], [dealer.seq(90, 20), dealer.decode(5)]
    shape = PromptShape(tokens=72, rows=5, extends=3)
    prompt_graph_is_a_plan(backend, shape, (large, *others), device, layers=2)


def prompt_graph_is_a_plan(
    backend: TritonBackend, shape: PromptShape, steps: Sequence[Sequence[Seq]], device: str, *, layers: int
) -> None:
    """Each of `steps`, one after the other, by one graph."""
    graph = backend.prompt_graph_plan(shape, max_pages=30)
    for sequences in steps:
        batch = make_batch(sequences)
        tokens = batch.num_tokens
        padded = [part.to(device) for part in make_qkv(shape.tokens)]
        for layer in range(layers):
            graph.load(as_prompt(batch, shape))
            graph.prepare()
            out = graph(layer, *padded)
            plain = backend.plan(batch)(layer, *(part[:tokens] for part in padded))
            assert torch.equal(out[:tokens], plain), sequences
            assert bool(out.isfinite().all()), "every token of padding has a result"


def check_a_prompt_graph_over_latents_gives_the_bits_of_a_plan(device: str) -> None:
    pool = latent_pool(device)
    dealer = PageDealer(pool=pool)
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=LATENT)
    shape = PromptShape(tokens=40, rows=4, extends=3)
    graph = backend.prompt_graph_plan(shape, max_pages=20)
    draws = torch.Generator().manual_seed(5)
    q, rows = (torch.randn(shape.tokens, heads, WIDTH, generator=draws).to(device) for heads in (NUM_HEADS, 1))
    for sequences in ([dealer.seq(30, 20), dealer.seq(40, 3), dealer.decode(200)], [dealer.seq(40, 40)]):
        batch = make_batch(sequences, page_size=pool.page_size)
        tokens = batch.num_tokens
        graph.load(as_prompt(batch, shape))
        graph.prepare()
        out = graph(0, q, rows, rows[..., :RANK])
        plain = backend.plan(batch)(0, q[:tokens], rows[:tokens], rows[:tokens, :, :RANK])
        assert torch.equal(out[:tokens], plain), sequences
        assert bool(out.isfinite().all()), "every token of padding has a result"


def latent_pool(device: str) -> KvPool:
    """A pool of latents full of random numbers."""
    pool = KvPool(
        num_pages=40, num_layers=1, num_kv_heads=1, head_dim=WIDTH, page_size=16, dtype=torch.float32, device=device,
        value_width=RANK,
    )  # fmt: skip
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def check_padding_writes_to_the_dummy_page_alone(device: str) -> None:  # [dummy-page]
    _, pool = pools(device)
    graph = TritonBackend(pool, num_heads=NUM_HEADS, specs=PLAIN).graph_plan(max_rows=3, max_pages=4)
    seq = PageDealer(pool=pool).decode(20)
    graph.load(make_batch([seq]))
    graph.prepare()
    before = pool.data.clone()
    graph(0, *(part.to(device) for part in make_qkv(3)))
    changed = [page for page in range(pool.num_pages) if not torch.equal(pool.data[page], before[page])]
    assert changed == sorted((0, seq.pages[1]))


def check_lengths_may_be_of_any_integer_type(device: str) -> None:
    _, pool = pools(device)
    batch = make_batch([PageDealer(pool=pool).seq(50, 20)])
    short = replace(batch, seq_lens=batch.seq_lens.int(), extend_lens=batch.extend_lens.int())
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=PLAIN)
    qkv = [part.to(device) for part in make_qkv(20)]
    assert torch.equal(backend.plan(batch)(0, *qkv), backend.plan(short)(0, *qkv))


def compile_nothing_that_warming_up_has_not() -> None:
    """No request waits for a compiler: prompts, mixed steps, any number of decodes, and graphs."""
    readers = {"extend_kernel", "split_kernel"}
    nothing_compiles_later(torch.bfloat16, warmed={*readers, "combine_kernel", "list_kernel"})
    nothing_compiles_later(torch.float8_e4m3fn, warmed=readers)


def nothing_compiles_later(dtype: torch.dtype, *, warmed: set[str]) -> None:
    pool = make_pool(num_pages=140, dtype=dtype)
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=PLAIN, dtype=torch.bfloat16)
    dealer = PageDealer(pool=pool)
    prompt, decodes = dealer.seq(40, 20), [dealer.decode(20) for _ in range(33)]
    with launches_that_only_compile(HOPPER) as compiled:
        backend.warm_up()
        first = list(compiled)
        assert set(first) == warmed
        for sequences in ([prompt], [prompt, decodes[0]], decodes[:1], decodes):
            batch = make_batch(sequences)
            plan = backend.plan(batch)
            for layer in range(len(PLAIN)):
                plan(layer, *make_qkv(batch.num_tokens, dtype=torch.bfloat16))
        graph = backend.graph_plan(max_rows=8, max_pages=5)
        graph.load(make_batch(decodes[:3]))
        graph.prepare()
        graph(0, *make_qkv(8, dtype=torch.bfloat16))
        shape = PromptShape(tokens=64, rows=9, extends=4)
        prompts = backend.prompt_graph_plan(shape, max_pages=5)
        prompts.load(as_prompt(make_batch([prompt, decodes[0]]), shape))
        prompts.prepare()
        prompts(0, *make_qkv(64, dtype=torch.bfloat16))
    assert compiled == first


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """A library's part, by the reference."""
    keys, values = (side.transpose(0, 1).float() for side in (keys, values))
    return attend_dense(q.float(), keys, values, keys.shape[0] - len(q), spec).to(q.dtype)


def check_long_prompts_go_to_a_library_and_other_rows_keep_their_bits(device: str) -> None:
    """Prompts and chunks by a library of each kind, with short ones and decodes between and behind them."""
    _, pool = pools(device, dtype=torch.bfloat16)
    dealer = PageDealer(pool=pool)
    long = [dealer.seq(40, 40), dealer.seq(150, 60)]
    sequences = [dealer.seq(20, 20), long[0], dealer.seq(90, 23), long[1], dealer.seq(33, 1), dealer.decode(70)]
    calls: list[tuple[int, int]] = []

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        calls.append((len(q), keys.shape[1]))
        return dense(q, keys, values, spec)

    ours = TritonBackend(pool, num_heads=NUM_HEADS, specs=SPECS, dtype=torch.bfloat16)
    for prefix in (True, False):
        library = Library(
            name="it", supports=Supports(prefix=prefix, window=True, capability=(0, 0), cpu=True), load=lambda _: attend
        )
        chooser = PromptChooser(wanted="it", libraries=[library], least_queries=24)
        theirs = TritonBackend(pool, num_heads=NUM_HEADS, specs=SPECS, dtype=torch.bfloat16, chooser=chooser)
        batch = make_batch(sequences)
        calls.clear()
        numbers = [part.to(device) for part in make_qkv(batch.num_tokens, dtype=torch.bfloat16)]
        with_library, without = theirs.plan(batch), ours.plan(batch)
        # The layer with a window begins to gather at the page of the first token that it sees; that with a cap is ours.
        assert torch.equal(with_library(1, *numbers), without(1, *numbers))
        assert calls == []
        out, expected = with_library(0, *numbers), without(0, *numbers)
        assert calls == [(40, 40), (60, 150 - 64)][: 1 + prefix]
        starts = [0, 20, 60, 83, 143, 144, 145]
        for index, (start, stop) in enumerate(itertools.pairwise(starts)):
            if index == 1 or (index == 3 and prefix):
                torch.testing.assert_close(out[start:stop], expected[start:stop], rtol=0.02, atol=0.02)
            else:
                assert torch.equal(out[start:stop], expected[start:stop]), index
        alone = theirs.plan(make_batch([long[0]]))(0, *(part[20:60] for part in numbers))
        assert torch.equal(alone, out[20:60]), "company changes nothing"


def check_rows_that_a_library_fails_at_are_ours(device: str) -> None:
    """In the layer where it raises and in those behind it, and in later steps; nothing is lost."""
    _, pool = pools(device, dtype=torch.bfloat16)
    dealer = PageDealer(pool=pool)
    batch = make_batch([dealer.seq(20, 20), dealer.seq(40, 40), dealer.seq(150, 60), dealer.decode(70)])
    numbers = [part.to(device) for part in make_qkv(batch.num_tokens, dtype=torch.bfloat16)]
    full = False

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if full and len(q) == 60:
            raise torch.OutOfMemoryError("no memory")
        return dense(q, keys, values, spec)

    library = Library(name="it", supports=Supports(capability=(0, 0), cpu=True), load=lambda _: attend)
    chooser = PromptChooser(wanted="it", libraries=[library], least_queries=24)
    theirs, ours = (
        TritonBackend(pool, num_heads=NUM_HEADS, specs=PLAIN, dtype=torch.bfloat16, chooser=one)
        for one in (chooser, None)
    )
    plan, expected = theirs.plan(batch), ours.plan(batch)(0, *numbers)
    full = True
    failed = plan(0, *numbers)
    assert torch.equal(failed[60:], expected[60:])
    assert torch.equal(failed[:20], expected[:20])
    torch.testing.assert_close(failed[20:60], expected[20:60], rtol=0.02, atol=0.02)
    later = plan(1, *numbers)
    assert torch.equal(later[60:], ours.plan(batch)(1, *numbers)[60:])
    assert theirs.plan(batch).long == {}


def check_no_row_is_long_without_a_library(device: str) -> None:
    """float32 is ours, whatever is installed, and nothing is loaded for it."""
    _, pool = pools(device)
    chooser = PromptChooser(libraries=[Library(name="it", supports=Supports(cpu=True), load=_never)], least_queries=1)
    backend = TritonBackend(pool, num_heads=NUM_HEADS, specs=SPECS, chooser=chooser)
    plan = backend.plan(make_batch([PageDealer(pool=pool).seq(40, 40)]))
    assert plan.long == {}


def _never(_facts: object) -> DenseAttend:
    raise AssertionError("loaded")


def check_warming_up_touches_no_page(device: str) -> None:
    _, pool = pools(device)
    before = pool.data.clone()
    TritonBackend(pool, num_heads=NUM_HEADS, specs=SPECS).warm_up()
    assert torch.equal(pool.data, before)
