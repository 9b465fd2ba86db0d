"""Attention over pages, as decodes and as prompts, compared with torch's kernels over dense K and V."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gpu.cases import PAGE, Case, CaseMaker
from tandem_engine.forward.batch import ForwardBatch, ForwardMode, SamplingBatch
from tandem_engine.kernels.triton.decode_attention import DecodeTiling
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.attention.backend import AttentionSpec
from tandem_engine.model.attention.paged_kernels import PagedAttention
from tandem_engine.model.attention.prompt_libraries import LIBRARIES, AttentionFacts, Library
from tandem_engine.model.attention.triton import TritonBackend, TritonPlan, trial_runs

TARGET_BATCH, TARGET_CONTEXT = 16, 4096
"""Decodes of at least so many sequences and tokens have a target."""
LARGE_PAGE = 64
FLEX_DECODE, FLEX_PROMPT = (16, 4096), 8192
"""With FlexAttention, which is compiled for each shape."""
POOL_SHARE = 0.75
"""Of the device's free memory, for the pool that fills it."""

FLOAT8_TILINGS = (
    DecodeTiling(block_n=128, num_stages=3, resident=2),
    DecodeTiling(block_n=128, num_stages=3, resident=1, num_warps=8),
    DecodeTiling(block_n=64, num_stages=4, resident=3, most_registers=168),
)
"""Measured next to the engine's. A block of 128 keys takes 14 % fewer instructions a key, and more registers."""


@dataclass(frozen=True)
class Setting:
    """How a case holds K and V, and how it is computed; None: as an engine does."""

    page: int = PAGE
    float8: bool = False
    tiling: DecodeTiling | None = None

    def __str__(self) -> str:
        named = f"pages of {self.page}{' in fp8' if self.float8 else ''}"
        if (tiling := self.tiling) is None:
            return named
        return f"{named}, {tiling.block_n} keys, {tiling.num_stages} stages, {tiling.num_warps} warps"


class AttentionCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        yield partial(self._decode, *self.sizes.decode[0], Setting())
        yield partial(self._decode, *self.sizes.decode[0], Setting(page=LARGE_PAGE))
        yield partial(self._prompt, *self.sizes.prompts[0])
        facts, spec = self._facts(), AttentionSpec(scale=self.shape.head_dim**-0.5)
        for library in LIBRARIES:
            if not library.supports.refusal(facts, spec):
                yield partial(self._library, library, *self.sizes.prompts[0])
        for batch, context in self.sizes.decode[1:]:
            yield partial(self._decode, batch, context, Setting())
        yield self._unequal
        for batch, context in self.sizes.float8:
            yield partial(self._decode, batch, context, Setting(float8=True))
        for tiling in FLOAT8_TILINGS:
            yield partial(self._decode, *self.sizes.float8[0], Setting(page=LARGE_PAGE, float8=True, tiling=tiling))
        for tokens, before in self.sizes.prompts[1:]:
            yield partial(self._prompt, tokens, before)
        for batch, context in self.sizes.decode[1:]:
            yield partial(self._decode, batch, context, Setting(page=LARGE_PAGE))
        yield partial(self._pool, PAGE)
        yield partial(self._pool, LARGE_PAGE)

    def _decode(self, batch: int, context: int, setting: Setting) -> Case:
        plan, q = self._planned([context] * batch, [1] * batch, setting)
        peers: dict[str, Callable[[], object]] = {}
        if setting == Setting():
            peers = self._dense(q, batch, context)
        measured = batch >= TARGET_BATCH and context >= TARGET_CONTEXT
        return Case(
            name=f"decode attention, {batch} × {context} tokens, {setting}",
            run=lambda: plan.attend(0, q),
            ceiling="copy",
            work=self._decode_bytes([context] * batch, setting),
            target=(0.7 if setting.float8 else 0.85) if measured else None,
            peers=peers,
        )

    def _dense(self, q: Tensor, batch: int, context: int) -> dict[str, Callable[[], object]]:
        shape = self.shape
        keys, values = (self.randn(batch, shape.kv_heads, context, shape.head_dim) for _ in range(2))
        dense_q = q[:, :, None]
        peers: dict[str, Callable[[], object]] = {
            "torch SDPA": lambda: scaled_dot_product_attention(dense_q, keys, values, enable_gqa=True)
        }
        if (batch, context) == FLEX_DECODE:
            peers["FlexAttention"] = flex_attention_of(dense_q, keys, values, causal=False)
        return peers

    def _unequal(self) -> Case:
        """As many tokens as the first case has, in sequences of very different lengths."""
        batch, context = self.sizes.decode[0]
        lens = [max(1, 2 * context * (row + 1) // (batch + 1)) for row in range(batch)]
        plan, q = self._planned(lens, [1] * batch, Setting())
        return Case(
            name=f"decode attention, {batch} sequences of {lens[0]} to {lens[-1]} tokens, {Setting()}",
            run=lambda: plan.attend(0, q),
            ceiling="copy",
            work=self._decode_bytes(lens, Setting()),
            target=0.85,
        )

    def _pool(self, page: int) -> Case:
        """Layers in turn, as steps read them, of a pool that fills the device: its pages are far from each other."""
        batch, context = self.sizes.pool
        layers = self.shape.layers
        itemsize = self.dtype.itemsize
        page_bytes = 2 * layers * self.shape.kv_heads * self.shape.head_dim * page * itemsize
        needed = batch * -(-context // page)
        free = torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0
        pages = max(needed, int(free * POOL_SHARE) // page_bytes)
        pool = self.pool(pages, page_size=page, layers=layers)
        plan, q = self._planned([context] * batch, [1] * batch, Setting(page=page), pool=pool)

        def every_layer() -> None:
            for layer in range(layers):
                plan.attend(layer, q)

        return Case(
            name=f"decode attention, {batch} × {context} tokens, {layers} layers of a pool, {Setting(page=page)}",
            run=every_layer,
            ceiling="copy",
            work=layers * self._decode_bytes([context] * batch, Setting()),
            facts={"pool GB": pool.total_bytes / 1e9},
        )

    def _prompt(self, tokens: int, before: int) -> Case:
        plan, q = self._planned([before + tokens], [tokens], Setting())
        shape = self.shape
        seen = tokens * before + tokens * tokens / 2
        return Case(
            name=f"extend attention, {tokens} tokens{f' behind {before}' if before else ''}",
            run=lambda: plan.attend(0, q),
            ceiling="matmul",
            work=4 * shape.heads * shape.head_dim * seen,
            target=0.6,
            peers={} if before else self._dense_prompt(q, tokens),
        )

    def _library(self, library: Library, tokens: int, before: int) -> Case:
        """What `--attention-backend` chooses from: K and V are gathered from pages in each call."""
        facts, shape = self._facts(), self.shape
        run = trial_runs(facts, AttentionSpec(scale=shape.head_dim**-0.5))(library.load(facts), tokens, before)
        return Case(
            name=f"prompt attention by {library.name}, {tokens} tokens, pages of {facts.page_size}",
            run=run,
            ceiling="matmul",
            work=4 * shape.heads * shape.head_dim * (tokens * before + tokens * tokens / 2),
            target=0.75,
        )

    def _facts(self) -> AttentionFacts:
        return AttentionFacts(
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            pool_dtype=self.dtype,
            page_size=LARGE_PAGE,
            device=self.device,
        )

    def _dense_prompt(self, q: Tensor, tokens: int) -> dict[str, Callable[[], object]]:
        shape = self.shape
        keys, values = (self.randn(1, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        dense_q = q.transpose(0, 1)[None]

        def sdpa() -> Tensor:
            return scaled_dot_product_attention(dense_q, keys, values, is_causal=True, enable_gqa=True)

        peers: dict[str, Callable[[], object]] = {"torch SDPA": sdpa}
        if tokens == FLEX_PROMPT:
            peers["FlexAttention"] = flex_attention_of(dense_q, keys, values, causal=True)
        return peers

    def _planned(
        self, seq_lens: list[int], extend_lens: list[int], setting: Setting, *, pool: KvPool | None = None
    ) -> tuple[TritonPlan, Tensor]:
        """A plan whose `attend` is the launch of attention alone, and its queries."""
        counts = [-(-length // setting.page) for length in seq_lens]
        held = pool or self.pool(
            sum(counts), page_size=setting.page, dtype=torch.float8_e4m3fn if setting.float8 else None
        )
        shape = self.shape
        specs = (AttentionSpec(scale=shape.head_dim**-0.5),) * held.data.shape[1]
        backend = TritonBackend(held, num_heads=shape.heads, specs=specs, dtype=self.dtype)
        batch = on_scrambled_pages(seq_lens, extend_lens, counts, setting.page, held.num_pages - 1, self.device)
        plan = backend.plan(batch)
        if setting.tiling is not None:
            assert isinstance(plan.attention, PagedAttention), "a tiling of K and V"
            plan = replace(plan, attention=replace(plan.attention, decode=setting.tiling))
        return plan, self.randn(sum(extend_lens), shape.heads, shape.head_dim)

    def _decode_bytes(self, lens: Sequence[int], setting: Setting) -> int:
        shape = self.shape
        itemsize = 1 if setting.float8 else self.dtype.itemsize
        keys_and_values = 2 * shape.kv_heads * sum(lens) * itemsize
        return shape.head_dim * (keys_and_values + 2 * shape.heads * len(lens) * self.dtype.itemsize)


def flex_attention_of(q: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Callable[[], Tensor]:
    """Of dense [batch, heads, tokens, head_dim]; compiled, where there is a device to compile it for."""
    attend: Callable[..., Tensor] = torch.compile(flex_attention) if q.device.type == "cuda" else flex_attention
    mask = None
    if causal:
        mask = create_block_mask(
            lambda _batch, _head, query, key: query >= key, None, None, q.shape[2], keys.shape[2], device=q.device.type
        )
    return lambda: attend(q, keys, values, block_mask=mask, enable_gqa=True)


def on_scrambled_pages(
    seq_lens: list[int],
    extend_lens: list[int],
    counts: list[int],
    page_size: int,
    pages: int,
    device: torch.device,
) -> ForwardBatch:
    """A step whose sequences have so many pages each, in no order, of a pool with `pages` and the dummy page."""
    order = torch.randperm(pages)[: sum(counts)] + 1
    table = torch.zeros((len(seq_lens), max(counts)), dtype=torch.int32)
    places = []
    taken = 0
    for row, (length, new, count) in enumerate(zip(seq_lens, extend_lens, counts, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(length - new, length)
        places.append(table[row, positions // page_size].long() * page_size + positions % page_size)
    slots = torch.cat(places)
    num_extend = sum(new > 1 for new in extend_lens)
    none, empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
    return ForwardBatch(
        step=0,
        mode=ForwardMode.EXTEND if num_extend else ForwardMode.DECODE,
        input_ids=torch.ones_like(slots).to(device),
        positions=torch.zeros_like(slots).to(device),
        out_cache_loc=slots.to(device),
        rows=torch.ones(len(seq_lens), dtype=torch.int64, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        extend_lens=torch.tensor(extend_lens, device=device),
        page_table=table.to(device),
        num_extend=num_extend,
        sample_index=none,
        sampling=SamplingBatch(temperature=empty, top_k=none, top_p=empty, min_p=empty, seed=none, position=none),
    )
