"""Requests as proposers see them, on real KV memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_engine.forward.batch import ForwardBatch, ForwardMode, Guesses
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.memory.radix_cache import RadixCache
from tandem_engine.memory.request_kv import RequestKv
from tandem_engine.messages.kv_events import BASE_SPACE
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.speculative.draft_history import PageStamps, WholeText
from tandem_engine.speculative.draft_model import ModelProposer
from tandem_engine.speculative.interface import DraftRequest
from tandem_testing.fake_executor import FakeModel, make_fake_pool
from tandem_testing.memory_builders import make_memory


@dataclass(kw_only=True)
class DraftBench:
    """KV memory and what becomes of requests in it."""

    page_size: int = 4
    memory: KvMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = make_memory(
            page_size=self.page_size, usable_pages=64, max_rows=8, max_pages=40, cache=RadixCache(self.page_size)
        )

    def request(self, text: Sequence[int], *, limit: int = 4, kv: RequestKv | None = None, **sampling) -> DraftRequest:
        """A running request whose newest token has no KV yet; with `kv` it continues."""
        tokens = list(text)
        if kv is None:
            kv = self.memory.begin(tokens, space=BASE_SPACE, max_match=len(tokens) - 1)
        assert self.memory.ensure(kv, len(tokens) + limit)
        self.memory.commit(kv, len(tokens) - 1)
        return DraftRequest(
            kv=kv,
            seq_len=len(tokens),
            token_ids=lambda start, stop: tokens[start:stop],
            sampling=SamplingParams(**{"max_tokens": 99, "temperature": 0.0, **sampling}),
            limit=limit,
        )

    def finish(self, request: DraftRequest) -> None:
        """Give its KV back; its pages stay in the prefix cache."""
        settled = request.token_ids(0, request.kv.committed_len)
        self.memory.release(request.kv, settled, checkpoint=True, after_step=None)


@dataclass(kw_only=True)
class FakeDrafts:
    """A proposer whose model is the fake one, over a pool of its own.

    That model reads its KV, so its guesses are right exactly when the bookkeeping of draft KV is.
    """

    model: FakeModel
    proposer: ModelProposer
    computed: list[int] = field(default_factory=list)
    """Tokens of settled text computed by each proposal."""


def make_fake_drafts(*, num_pages: int, page_size: int, vocab_size: int, max_text: int = 10_000) -> FakeDrafts:
    model = FakeModel(pool=make_fake_pool(num_pages=num_pages, page_size=page_size), vocab_size=vocab_size)
    computed: list[int] = []

    def compute(batches: Sequence[ForwardBatch]) -> Guesses:
        computed.extend(batch.num_tokens for batch in batches if batch.mode is ForwardMode.DRAFT_EXTEND)
        results = [model.forward(batch) for batch in batches]
        return Guesses(lambda: results)

    proposer = ModelProposer(
        name="DRAFT",
        network=compute,
        history=WholeText(stamps=PageStamps(num_pages)),
        run=lambda function: function(),
        page_size=page_size,
        positions=10_000,
        max_text=max_text,
    )
    return FakeDrafts(model=model, proposer=proposer, computed=computed)
