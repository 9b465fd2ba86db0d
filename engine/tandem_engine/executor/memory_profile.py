"""What the largest step needs beside weights and KV, found out by running it on dummy data.

    as many prompt tokens as a step may have, in chunks of chunked_prefill_size, then decodes
    max_running_requests rows of logits, all sampled with every filter on

So a step in service never needs more, and the rest of the memory can be KV pages [memory-profile].
"""

from collections.abc import Callable
from math import ceil

import torch

from tandem_engine.config import SchedulerConfig
from tandem_engine.executor.memory_meter import MemoryMeter
from tandem_engine.forward.forward_batch import ForwardBatch, ForwardResult, SamplingBatch
from tandem_engine.forward.forward_mode import ForwardMode
from tandem_engine.names import PADDING_ROW


def profile_pages(config: SchedulerConfig, page_size: int) -> int:
    """Pages of the pool that `largest_step` runs on, the dummy page included."""
    return 1 + ceil(_longest_chunk(config) / page_size)


def measure_activations(
    forward: Callable[[ForwardBatch], ForwardResult],
    meter: MemoryMeter,
    config: SchedulerConfig,
    *,
    page_size: int,
) -> int:
    """Bytes that the largest step takes beyond what was taken before it.

    `forward` runs over a pool of `profile_pages`, where and how forwards run in service.
    """
    batch = largest_step(config, page_size=page_size)
    # Once before: compiled kernels, thread teams and workspaces stay, and are no part of a step.
    forward(largest_step(config, page_size=page_size, tokens=1))
    return meter.peak_growth(lambda: forward(batch))


def largest_step(config: SchedulerConfig, *, page_size: int, tokens: int | None = None) -> ForwardBatch:
    """A step at every limit of `config`, or of `tokens` prompt tokens.

    All sequences lie on the same pages: what they compute means nothing, and the pool stays small.
    """
    lens = _chunks(tokens or config.prefill_budget(decodes=0), _longest_chunk(config))
    num_extend = len(lens)
    lens += [1] * (config.max_running_requests - num_extend)
    extend_lens = torch.tensor(lens)
    positions = torch.cat([torch.arange(length) for length in lens])
    pages = torch.arange(1, profile_pages(config, page_size), dtype=torch.int32)
    table = pages.repeat(len(lens), 1)
    return ForwardBatch(
        step=0,
        mode=ForwardMode.MIXED if len(lens) > num_extend else ForwardMode.EXTEND,
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        out_cache_loc=table[0, positions // page_size].long() * page_size + positions % page_size,
        rows=torch.full((len(lens),), PADDING_ROW),
        seq_lens=extend_lens,
        extend_lens=extend_lens,
        page_table=table,
        num_extend=num_extend,
        sample_index=torch.arange(len(lens)),
        sampling=_every_filter(len(lens)),
    )


def _longest_chunk(config: SchedulerConfig) -> int:
    return min(config.chunk_limit(decodes=0), config.prefill_budget(decodes=0), config.context_length)


def _chunks(tokens: int, longest: int) -> list[int]:
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest else [])


def _every_filter(rows: int) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.full((rows,), 0.01),
        seed=torch.zeros(rows, dtype=torch.int64),
        position=torch.ones(rows, dtype=torch.int64),
    )
