"""What is done to logits, and to rows and pages of tables."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpu.cases import PAGE, Case, CaseMaker
from tandem_engine.base.names import DigestKind
from tandem_engine.disaggregation import digest_triton
from tandem_engine.disaggregation.digest_words import mix_torch, sampled_digests_torch, sampled_rows, word_bytes
from tandem_engine.disaggregation.packed_pages import WORD_TYPES
from tandem_engine.kernels.triton.page_copy import copy_pages, gather_pages
from tandem_engine.kernels.triton.penalties import RowPenalties, edit_logits
from tandem_engine.kernels.triton.row_tables import gather_rows
from tandem_engine.kernels.triton.sampling import sample

SECTOR = 32
"""Bytes that a device reads for any of them."""


class TableCases(CaseMaker):
    def cases(self) -> Iterator[Callable[[], Case]]:
        yield self._penalties
        yield self._sampling
        yield self._rows
        yield self._page_copy
        yield self._page_gather
        yield partial(self._digests, DigestKind.FULL)
        yield partial(self._digests, DigestKind.SAMPLED)

    def _penalties(self) -> Case:
        rows, vocabulary = self.sizes.sampled, self.sizes.vocabulary
        logits = torch.randn((rows, vocabulary), device=self.device)
        counts = torch.randint(0, 3, (rows, vocabulary), dtype=torch.int32, device=self.device)
        in_prompt, ones = counts.bool(), torch.ones(rows, device=self.device)
        strength = RowPenalties(
            slots=torch.arange(rows, device=self.device),
            repetition=ones * 1.2, frequency=ones * 0.1, presence=ones * 0.2,
            counts=counts, in_prompt=in_prompt,
        )  # fmt: skip

        def by_torch() -> Tensor:
            seen = in_prompt | (counts > 0)
            repeated = torch.where(logits > 0, logits / 1.2, logits * 1.2)
            return torch.where(seen, repeated, logits) - 0.1 * counts - 0.2 * (counts > 0)

        return Case(
            name=f"penalties, {rows} × {vocabulary}",
            run=lambda: edit_logits(logits, strength),
            ceiling="copy",
            work=2 * logits.nbytes + counts.nbytes + in_prompt.nbytes,
            peers={"torch": by_torch},
        )

    def _sampling(self) -> Case:
        rows, vocabulary = self.sizes.sampled, self.sizes.vocabulary
        logits = torch.randn((rows, vocabulary), device=self.device)
        ones, ids = torch.ones(rows, device=self.device), torch.arange(rows, device=self.device)

        def by_sorting() -> Tensor:
            probabilities, tokens = logits.softmax(-1).sort(-1, descending=True)
            probabilities[probabilities.cumsum(-1) - probabilities > 0.9] = 0.0
            return tokens.gather(1, probabilities.multinomial(1))

        filters = {"top_k": torch.full_like(ids, 50), "top_p": ones * 0.9, "min_p": torch.zeros_like(ones)}
        return Case(
            name=f"sampling with top-k and top-p, {rows} × {vocabulary}",
            run=lambda: sample(logits, temperature=ones, seed=ids, position=ids, **filters),
            ceiling="copy",
            work=logits.nbytes,
            peers={"torch sort": by_sorting},
        )

    def _rows(self) -> Case:
        tokens = self.sizes.tokens
        table, rows = self.randn(2 * tokens, self.shape.hidden), torch.randperm(2 * tokens, device=self.device)[:tokens]
        return Case(
            name=f"rows of a table, {tokens} of {2 * tokens}",
            run=lambda: gather_rows(table, rows),
            ceiling="copy",
            work=table.nbytes,
            peers={"torch index_select": lambda: torch.index_select(table, 0, rows)},
        )

    def _page_copy(self) -> Case:
        count = -(-self.sizes.tokens // PAGE)
        pool = self.pool(2 * count).bytes_view()
        pages, copies = (torch.randperm(2 * count, device=self.device) + 1).split(count)
        return Case(
            name=f"page copies, {count} pages",
            run=lambda: copy_pages(pool, pages, copies),
            ceiling="copy",
            work=2 * count * pool.shape[1],
            peers={"torch index_select": lambda: torch.index_select(pool, 0, pages)},
        )

    def _page_gather(self) -> Case:
        """Over the bus, compared with a copy of as many contiguous bytes."""
        count = -(-self.sizes.tokens // PAGE)
        pool = self.pool(count).bytes_view()
        pinned = self.device.type == "cuda"
        host, dense = (torch.zeros((count, pool.shape[1]), dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
        there, here = torch.randperm(count, device=self.device) + 1, torch.randperm(count, device=self.device)
        return Case(
            name=f"pages to the host, {count} pages",
            run=lambda: gather_pages(pool, host, there, here),
            ceiling="copy",
            work=host.nbytes,
            peers={"a copy of as many bytes to the host": lambda: dense.copy_(pool[1:], non_blocking=True)},
        )

    def _digests(self, kind: DigestKind) -> Case:
        """On the device: what comes back is 8 bytes a page."""
        count = -(-self.sizes.tokens // PAGE)
        pool = self.pool(count)
        layout = pool.layout
        width = word_bytes(layout)
        words = pool.bytes_view().view(WORD_TYPES[width])
        pages = torch.randperm(count, device=self.device) + 1
        keys = torch.arange(count, device=self.device)
        rows = torch.from_numpy(sampled_rows(layout, layout.slots)).to(self.device)
        used, sums = torch.full_like(keys, layout.slots), torch.zeros_like(keys)
        table = torch.stack((pages, mix_torch(keys), used, sums))
        if kind is DigestKind.FULL:
            return Case(
                name=f"digests of every byte, {count} pages",
                run=lambda: digest_triton.add_words(words, table),
                ceiling="copy",
                work=count * pool.page_bytes,
            )
        return Case(
            name=f"digests of samples, {count} pages",
            run=lambda: digest_triton.add_samples(words, table, layout, range(layout.heads)),
            ceiling="copy",
            work=count * len(rows) * SECTOR,
            peers={"torch": lambda: sampled_digests_torch(words, pages, keys, layout, rows)},
        )
