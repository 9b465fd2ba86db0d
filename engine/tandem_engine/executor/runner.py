"""One step from start to end, on the device.

    resolve ─▶ model forward, attention as planned ─▶ sample ─▶ publish ─▶ copy to host

The runner keeps nothing between steps but what its parts keep: KV pages and the newest token of each row.
"""

import time

from torch import Tensor

from tandem_engine.attention.backend import AttentionBackend
from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult
from tandem_engine.forward.future_map import FutureMap, token_rows
from tandem_engine.memory.pool import KvPool
from tandem_engine.model.base import CausalLM
from tandem_engine.sampling.sampler import Sampler


class ModelRunner:
    """Computes batches in the order they come. One thread at a time, under `torch.inference_mode`."""

    def __init__(
        self,
        *,
        model: CausalLM,
        pool: KvPool,
        backend: AttentionBackend,
        sampler: Sampler,
        future_map: FutureMap,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self._sampler = sampler
        self._future_map = future_map

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Run `batch`: KV is written, sampled tokens are published to their rows and returned."""
        started = time.perf_counter()
        if batch.num_tokens == 0:
            return ForwardResult(step=batch.step, next_token_ids=())
        logits = self.logits(batch)
        if len(logits) == 0:
            return ForwardResult(step=batch.step, next_token_ids=(), compute_s=time.perf_counter() - started)
        sampled = self._sampler.sample(logits, batch.sampling)
        self._future_map.publish(batch.rows[batch.sample_index], sampled.token_ids)
        return ForwardResult(
            step=batch.step,
            next_token_ids=tuple(sampled.token_ids.tolist()),
            logprobs=sampled.logprobs,
            compute_s=time.perf_counter() - started,
        )

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Run the model alone: KV is written, nothing is sampled. float32 [S, vocab]."""
        if batch.page_copies:
            self.pool.copy_pages(batch.page_copies)
        input_ids = self._future_map.resolve(batch.input_ids, token_rows(batch))
        attend = self.backend.plan(batch)
        hidden = self.model.forward(input_ids, batch.positions, attend, _last_tokens(batch))
        return self.model.logits(hidden)


def _last_tokens(batch: ForwardBatch) -> Tensor:
    """[S] the index of each sampling sequence's last token among the step's tokens."""
    if batch.num_extend == 0:
        return batch.sample_index
    return batch.extend_lens.cumsum(0)[batch.sample_index] - 1
