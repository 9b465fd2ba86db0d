"""Runners of a toy model: on streams of the simulated device, and beside it on the host."""

from dataclasses import dataclass, field

import torch

from tandem_engine.executor.cuda.runner import StreamRunner
from tandem_engine.executor.platform import RunnerParts
from tandem_engine.executor.runner import ModelRunner
from tandem_engine.forward.future_map import FutureMap
from tandem_engine.model.attention.reference import TorchReferenceBackend
from tandem_engine.model.base import CausalLM
from tandem_engine.sampling.sampler import Sampler
from tandem_testing.forward_builders import NUM_HEADS, PLAIN, make_pool
from tandem_testing.simulated_platform import SimulatedPlatform
from tandem_testing.toy_model import ToyModel

ROWS = 8


@dataclass(kw_only=True)
class Beside:
    """The same model and the same pages twice."""

    platform: SimulatedPlatform = field(default_factory=SimulatedPlatform)
    graph_sizes: tuple[int, ...] = ()
    prompt_sizes: tuple[int, ...] = ()
    model: CausalLM = field(default_factory=ToyModel.random)
    streams: StreamRunner = field(init=False)
    host: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        self.streams = self.platform.runner(
            RunnerParts(
                model=self.model,
                pool=make_pool(),
                num_heads=NUM_HEADS,
                dtype=torch.float32,
                rows=ROWS,
                max_pages=4,
                graph_sizes=self.graph_sizes,
                prompt_sizes=self.prompt_sizes,
            )
        )
        pool = make_pool()
        self.host = ModelRunner(
            model=self.model,
            pool=pool,
            backend=TorchReferenceBackend(pool, specs=PLAIN),
            sampler=Sampler(),
            future_map=FutureMap(ROWS),
        )
