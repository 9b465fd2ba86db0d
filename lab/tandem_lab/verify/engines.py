"""How a path builds and uses its engine: with one rank, with ranks as threads, or with a session in turns.

`ThreadRanks` has the ranks of a tensor-parallel engine as threads of this process, with real gloo between them. What is
computed and exchanged is the same as with rank processes (`launch`), but the weights are read once for all paths, and
no path waits for processes to start. Rank 0 is the caller's thread.

`in_turns`: a resumed request as two turns of a session

    whole     prompt, resumed tokens r₀ … rₙ           ─▶ the rest of the reference
    turn 0    prompt                                   ─▶ r₀ … rₙ₋₁
    turn 1    rₙ                                       ─▶ the rest of the reference

`appended`: a prompt in two turns, of which the first adds no output to the session

    turn 0    first half of the prompt                 ─▶ one token, which is dropped
    turn 1    second half                              ─▶ the reference
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

import msgspec
import torch
from torch._C._distributed_c10d import HashStore

from tandem_engine.base.errors import EngineStoppedError
from tandem_engine.config import EngineConfig, ParallelConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.engine.loaded_model import LoadedModel, load
from tandem_engine.engine.stats import Generation, Generations
from tandem_engine.executor.platform import Platform
from tandem_engine.library.async_llm import EngineThread
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest, SessionRef
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.parallel.group import FirstFailure
from tandem_engine.parallel.torch_group import join_ranks
from tandem_engine.scheduler.output_stream import Sink, discard
from tandem_lab.verify.compare import Generate

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
        # The others wait for this rank; its failure, which is theirs too, and closed connections notify them.
        part.parallel.failure.record(error)
        part.parallel.close()
        raise


def in_turns(generate: Generate) -> Generate:
    """As `generate`, with a session for each request that two turns can send.

    One whose first turn already goes wrong ends with that turn's output, which differs from any reference.
    """

    def converse(requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        two_turns = [request for request in requests if _has_two_turns(request)]
        first = generate([_first_turn(request) for request in two_turns], stagger)
        wrong = {
            request.rid: output
            for request, output in zip(two_turns, first, strict=True)
            if tuple(output.token_ids) != request.resume_ids[:-1]
        }
        second = [_second_turn(request) if _has_two_turns(request) else request for request in requests]
        outputs = generate(second, stagger)
        return [wrong.get(request.rid, output) for request, output in zip(requests, outputs, strict=True)]

    return converse


def appended(generate: Generate) -> Generate:
    """As `generate`, with the first half of each prompt computed by a turn that keeps no output."""

    def feed(requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        generate([_first_half(request) for request in requests if len(request.input_ids) > 1], stagger)
        return generate([_second_half(request) for request in requests], stagger)

    return feed


def _first_half(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request,
        rid=f"{request.rid}, first half",
        input_ids=request.input_ids[: len(request.input_ids) // 2],
        session=SessionRef(id=request.rid, keeps_output=False),
        sampling=SamplingParams(max_tokens=1),
    )


def _second_half(request: GenerateRequest) -> GenerateRequest:
    if len(request.input_ids) < 2:
        return request
    rest = request.input_ids[len(request.input_ids) // 2 :]
    return msgspec.structs.replace(request, input_ids=rest, session=SessionRef(id=request.rid, turn=1))


def _has_two_turns(request: GenerateRequest) -> bool:
    # A grammar or a budget covers the output of its own turn alone.
    return len(request.resume_ids) > 1 and not request.sampling.masked


def _first_turn(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(
        request,
        rid=f"{request.rid}, first turn",
        resume_ids=(),
        session=SessionRef(id=request.rid),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=len(request.resume_ids) - 1),
    )


def _second_turn(request: GenerateRequest) -> GenerateRequest:
    left = request.sampling.max_tokens - len(request.resume_ids)
    return msgspec.structs.replace(
        request,
        input_ids=request.resume_ids[-1:],
        resume_ids=(),
        session=SessionRef(id=request.rid, turn=1),
        sampling=msgspec.structs.replace(request.sampling, max_tokens=left),
    )


MAX_WAIT = 600.0
"""Seconds after which the thread is taken for hung."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threaded:
    """As `Engine.generate`, with requests handed over one by one while others run."""

    engine: Engine
    """To be looked at while nothing runs."""
    thread: EngineThread
    generations: Generations
    all_ended: threading.Event

    @classmethod
    def build(cls, loaded: LoadedModel, config: EngineConfig) -> Self:
        generations, all_ended, built = Generations(), threading.Event(), []

        def take(client: bytes, outputs: tuple[TokenOutput, ...]) -> None:
            generations(client, outputs)
            if all(generation.finished is not None for generation in [*generations.by_rid.values()]):
                all_ended.set()

        def build() -> Engine:
            built.append(Engine.build(loaded, config, sink=take))
            return built[0]

        def stop_waiting(error: EngineStoppedError) -> None:
            del error  # `generate` finds outputs unfinished
            all_ended.set()

        thread = EngineThread(build, on_failure=stop_waiting)
        return cls(engine=built[0], thread=thread, generations=generations, all_ended=all_ended)

    def generate(self, requests: Sequence[GenerateRequest], stagger: int) -> list[Generation]:
        """Arrivals have no schedule here, so `stagger` means nothing."""
        del stagger
        self.all_ended.clear()
        for request in requests:
            self.generations.expect(request.rid, resumed=len(request.resume_ids))
        for request in requests:
            self.thread.ask(lambda engine, request=request: engine.add(request))  # type: ignore[misc]
        assert self.all_ended.wait(MAX_WAIT), "the engine's thread does not come to an end"
        # Until its next iteration the engine still releases what has ended.
        self.thread.call(lambda engine: engine.scheduler.stand_still()).result()
        return self.generations.take_all([request.rid for request in requests])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.close()
