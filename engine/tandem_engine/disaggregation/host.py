"""What the transfer stages ask of the scheduler they are attached to."""

from collections.abc import Iterable
from typing import Protocol

from tandem_engine.clock import Clock
from tandem_engine.memory.kv_memory import KvMemory
from tandem_engine.messages.outputs import Finish
from tandem_engine.scheduler.kept_back import KeptBack
from tandem_engine.scheduler.request import Request


class StageHost(Protocol):
    """The scheduler, as far as transfers need it. See `StageSide` for the contracts of the methods."""

    @property
    def memory(self) -> KvMemory: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def launched(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def admit_prebuilt(self, req: Request) -> None: ...

    def stop_of(self, req: Request) -> Finish | None: ...

    def release(self, req: Request, *, checkpoint: bool = True) -> None: ...

    def finish(self, req: Request, finish: Finish) -> None: ...

    def spare_pages(self) -> int: ...

    def kept_back(self, req: Request) -> KeptBack: ...

    def give_way(self) -> bool: ...

    def next_outside(self, requests: Iterable[Request]) -> Request | None: ...

    def spare_requests(self) -> int: ...
