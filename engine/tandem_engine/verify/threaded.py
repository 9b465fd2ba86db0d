"""An engine on a thread of its own, asked from this one."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.errors import EngineStoppedError
from tandem_engine.generation import Generation, Generations
from tandem_engine.library.engine_thread import EngineThread
from tandem_engine.loaded_model import LoadedModel
from tandem_engine.messages.outputs import TokenOutput
from tandem_engine.messages.requests import GenerateRequest

LONGEST_WAIT = 600.0
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
        assert self.all_ended.wait(LONGEST_WAIT), "the engine's thread does not come to an end"
        # Until the engine has turned once more it is still letting go of what has ended.
        self.thread.call(lambda engine: engine.scheduler.stand_still()).result()
        return self.generations.take_all([request.rid for request in requests])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thread.close()
