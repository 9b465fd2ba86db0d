"""Has kernels compiled before requests come, by running the steps that launch them all (`warm_steps`).

Steps write to pages that the caller has reserved, to the row of padding, and to the first slot of penalties, which a
request loads anew before it uses it. Their results are dropped.
"""

import logging
import time
from collections.abc import Callable, Iterable

import torch

from tandem_engine.executor.warm_steps import WarmStep
from tandem_engine.forward.forward_batch import ForwardBatch
from tandem_engine.kernels.compiles import COMPILED

logger = logging.getLogger(__name__)

NOTABLE_S = 1.0
"""A step that takes longer has a line of its own in the log, so that a start which compiles is seen to go on."""


@torch.inference_mode()
def warm_up(run: Callable[[ForwardBatch], object], steps: Iterable[WarmStep], *, of: str) -> None:
    """`run` each of `steps` and wait for it; `of`: whose they are, for the log."""
    for step in steps:
        began, before = time.perf_counter(), COMPILED.counts.starting
        run(step.batch)
        seconds, compiled = time.perf_counter() - began, COMPILED.counts.starting - before
        logger.log(
            logging.INFO if seconds >= NOTABLE_S else logging.DEBUG,
            "warming up %s: %s: %d kernels in %.1f s",
            of,
            step.name,
            compiled,
            seconds,
        )
