"""The graphs of a runner: of decodes, and of steps with prompts. They share one pool of memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tandem_engine.executor.cuda.graphs import (
    DecodeGraph,
    DecodeGraphs,
    Decoding,
    GraphCapturer,
    capture_decode,
    capture_decodes,
    no_garbage_collection,
)
from tandem_engine.executor.cuda.prompt_graphs import (
    NO_PROMPT_GRAPHS,
    PromptGraph,
    PromptGraphs,
    capture_prompt,
    capture_prompts,
)
from tandem_engine.executor.memory_profile import MemoryMeter
from tandem_engine.forward.batch import ForwardBatch
from tandem_engine.forward.step_inputs import can_be_decodes


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """See the module."""

    decodes: DecodeGraphs
    prompts: PromptGraphs

    def fitting(self, batch: ForwardBatch) -> DecodeGraph | PromptGraph | None:
        """The smallest that can run `batch`, on the host, if there is one."""
        if can_be_decodes(batch):
            graph = self.decodes.fitting(batch.num_tokens)
            if graph is not None:
                return graph
        return self.prompts.fitting(batch)


NO_GRAPHS = StepGraphs(DecodeGraphs(()), NO_PROMPT_GRAPHS)


def capture_steps(
    capturer: GraphCapturer,
    decoding: Decoding,
    *,
    decodes: Sequence[int],
    prompts: Sequence[int],
    meter: MemoryMeter,
) -> StepGraphs:
    """Capture decodes of so many rows, and steps with prompts of so many tokens. It takes seconds."""
    capturer.new_pool()
    return StepGraphs(
        capture_decodes(capturer, decoding, decodes, meter=meter),
        capture_prompts(capturer, decoding, prompts, meter=meter),
    )


@torch.inference_mode()
def measure_steps(
    capturer: GraphCapturer,
    decoding: Decoding,
    *,
    decodes: Sequence[int],
    prompts: Sequence[int],
    meter: MemoryMeter,
) -> int:
    """Bytes that `capture_steps` will take. Of each kind the two largest are captured: the first of them, and what the
    second adds in the same pool, for each further one.
    """
    capturer.new_pool()
    kept: list[object] = []
    taken = 0
    for capture, sizes in ((capture_decode, decodes), (capture_prompt, prompts)):
        used = [meter.used()]
        with no_garbage_collection():
            for size in sorted(sizes, reverse=True)[:2]:
                kept.append(capture(capturer, decoding, size))
                used.append(meter.used())
        grown = [max(0, after - before) for before, after in pairwise(used)]
        taken += sum(grown[:1]) + sum(grown[1:]) * (len(sizes) - 1)
    return taken
