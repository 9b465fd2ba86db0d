"""The ranks of a tensor-parallel engine as threads of this process, with real gloo between them.

What is computed and exchanged is what rank processes compute and exchange (`launch`), but the weights are read
once for all paths, and no path waits for processes to start. Rank 0 is the caller's thread.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch._C._distributed_c10d import HashStore

from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.executor.platform import Platform
from tandem_engine.loaded_model import LoadedModel, load
from tandem_engine.parallel.failure import FirstFailure
from tandem_engine.parallel.torch_group import join_ranks
from tandem_engine.scheduler.stream import Sink, discard

PlatformMaker = Callable[[], Platform | None]
"""What each engine's steps run on; None is what its device says."""


def platform_of_device() -> Platform | None:
    """A `PlatformMaker`: whatever is served."""
    return None


class EngineMaker(Protocol):
    """A model in memory, with as many ranks as it may have."""

    def engine(
        self, config: EngineConfig, *, sink: Sink | None = None, port: EnginePort | None = None
    ) -> AbstractContextManager[Engine]:
        """An engine around it for as long as the context lasts; see `Engine.build`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """An `EngineMaker` of engines without further ranks."""

    model: LoadedModel
    platform: PlatformMaker = platform_of_device

    def engine(
        self, config: EngineConfig, *, sink: Sink | None = None, port: EnginePort | None = None
    ) -> AbstractContextManager[Engine]:
        return Engine.build(self.model, config, sink=sink, port=port, platform=self.platform())


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadRanks:
    """An `EngineMaker` with every rank's part of one model, for any number of engines one after the other."""

    parts: Sequence[LoadedModel]
    platform: PlatformMaker = platform_of_device

    @classmethod
    def load(cls, config: EngineConfig, size: int) -> Self:
        """Read `config`'s checkpoint `size` times, each rank its part."""
        config = replace(config, parallel=ParallelConfig(tp_size=size))
        store, failure = HashStore(), FirstFailure()

        def load_part(rank: int) -> LoadedModel:
            parallel = join_ranks(
                store,
                rank=rank,
                size=size,
                device=torch.device(config.device),
                timeout_s=config.parallel.timeout,
                failure=failure,
            )
            return load(config, progress=False, parallel=parallel)

        with ThreadPoolExecutor(size, thread_name_prefix="rank") as threads:
            return cls(parts=tuple(threads.map(load_part, range(size))))

    @contextmanager
    def engine(
        self, config: EngineConfig, *, sink: Sink | None = None, port: EnginePort | None = None
    ) -> Iterator[Engine]:
        """Rank 0's engine, which the other ranks follow until it is closed."""
        first, *others = self.parts
        config = replace(config, parallel=first.config.parallel)
        with ThreadPoolExecutor(len(others), thread_name_prefix="rank") as threads:
            followers = [threads.submit(_follow, part, config, self.platform) for part in others]
            with Engine.build(first, config, sink=sink, port=port, platform=self.platform()) as engine:
                yield engine
            for follower in followers:
                follower.result()


def _follow(part: LoadedModel, config: EngineConfig, platform: PlatformMaker) -> None:
    try:
        with Engine.build(part, config, sink=discard, platform=platform()) as engine:
            engine.follow()
    except Exception as error:
        # The others wait for this rank; its failure, which is theirs too, and closed connections tell them.
        part.parallel.failure.record(error)
        part.parallel.close()
        raise
