"""Loads of adapters next to a running engine: their order, hung file systems, and an engine that closes during a
load."""

import errno
import time
from pathlib import Path
from threading import Event

import pytest
import torch

from tandem_engine.base.errors import BusyError, CheckpointError, EngineStoppedError
from tandem_engine.config import AdapterConfig
from tandem_engine.engine import adapter_loads
from tandem_engine.engine.adapter_loads import AdapterLoads
from tandem_engine.engine.load_threads import MAX_HUNG
from tandem_engine.model.adapters.loaded import LoadedAdapters
from tandem_engine.model.adapters.table import AdapterTable
from tandem_engine.parallel.agreement import Agreement
from tandem_engine.parallel.group import SingleRank
from tandem_testing.random_weights import small_config

LIMIT_S = 60.0
"""For what does not wait."""


class Folders:
    """What loads read: the folder `hung` does not answer before it is freed."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.reached = Event()
        self.freed = Event()

    def load(self, config: AdapterConfig, *_: object, **__: object) -> LoadedAdapters:
        [source] = config.sources
        self.read.append(source.path)
        if source.path == "hung":
            self.reached.set()
            self.freed.wait(LIMIT_S)
        if source.path == "slow":
            used = time.thread_time()
            while time.thread_time() - used < 1.0:
                pass
        if source.path == "large":
            raise MemoryError("of this machine")
        return LoadedAdapters()


@pytest.fixture
def folders(monkeypatch):
    folders = Folders()
    monkeypatch.setattr(adapter_loads, "LoadedAdapters", folders)
    yield folders
    folders.freed.set()


@pytest.fixture
def loads(folders):
    loads = AdapterLoads(
        table=AdapterTable(limit=4),
        config=AdapterConfig(allow_updates=True),
        base=small_config(),
        dtype=torch.float32,
        device="cpu",
        group=SingleRank(),
        agreement=Agreement(SingleRank()),
        close_s=0.0,
    )
    yield loads
    folders.freed.set()
    loads.close()


def test_loads_run_in_their_order(loads, folders):
    first, second = loads.begin("a", "hung"), loads.begin("b", "two")
    assert folders.reached.wait(LIMIT_S)
    assert (folders.read, second.done()) == (["hung"], False)
    folders.freed.set()
    assert first.result(LIMIT_S) == second.result(LIMIT_S) == LoadedAdapters()
    assert folders.read == ["hung", "two"]


def test_error_of_any_kind_names_the_adapter(loads):
    with pytest.raises(CheckpointError, match="'a' cannot be loaded: MemoryError: of this machine"):
        loads.begin("a", "large").result(LIMIT_S)
    assert loads.begin("b", "two").result(LIMIT_S) == LoadedAdapters()


def test_engine_closes_while_a_file_system_hangs(loads, folders):
    hung, waiting = loads.begin("a", "hung"), loads.begin("b", "two")
    assert folders.reached.wait(LIMIT_S)
    loads.close()
    assert (hung.done(), waiting.cancelled(), folders.freed.is_set()) == (False, True, False)
    loads.close()
    with pytest.raises(EngineStoppedError):
        loads.begin("c", "two")
    folders.freed.set()
    assert hung.result(LIMIT_S) == LoadedAdapters()
    assert folders.read == ["hung"]


def test_load_that_hangs_fails_and_the_next_one_runs(loads, folders):
    loads.threads.hung_s = 0.5
    hung, after = loads.begin("a", "hung"), loads.begin("b", "two")
    with pytest.raises(BusyError, match="'a' cannot be loaded: its file system has not answered for 0.5 s"):
        hung.result(LIMIT_S)
    assert after.result(LIMIT_S) == LoadedAdapters()
    assert folders.read == ["hung", "two"]


def test_load_that_hangs_fails_after_its_time_could_not_be_read(loads, folders, monkeypatch):
    """A process that has no free descriptor for a while still looks at its loads after that."""
    refused, read_text = Event(), Path.read_text

    def refuse_once(path, *args):
        if path.parts[:3] == ("/", "proc", "self") and not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", refuse_once)
    loads.threads.hung_s = 0.5
    with pytest.raises(BusyError, match="has not answered"):
        loads.begin("a", "hung").result(10.0)
    assert refused.is_set()


def test_load_that_uses_the_cpu_is_not_taken_for_hung(loads, folders):
    loads.threads.hung_s = 0.5
    assert loads.begin("a", "slow").result(LIMIT_S) == LoadedAdapters()


def test_loads_are_refused_while_too_many_hang(loads, folders):
    loads.threads.hung_s = 0.5
    for number in range(MAX_HUNG):
        with pytest.raises(BusyError):
            loads.begin(f"h{number}", "hung").result(LIMIT_S)
    with pytest.raises(BusyError, match=f"'a' cannot be loaded: {MAX_HUNG} loads wait"):
        loads.begin("a", "two")
    folders.freed.set()
    assert wait_for_load(loads) == LoadedAdapters()


def test_queued_loads_fail_when_the_last_thread_hangs(loads, folders):
    loads.threads.hung_s = 0.5
    hung = [loads.begin(f"h{number}", "hung") for number in range(MAX_HUNG)]
    queued = loads.begin("a", "two")
    with pytest.raises(BusyError, match="'a' cannot be loaded"):
        queued.result(LIMIT_S)
    assert all(each.done() for each in hung)


def wait_for_load(loads: AdapterLoads) -> LoadedAdapters:
    """Of a folder that answers, once a thread is free for it."""
    for _ in range(int(LIMIT_S * 20)):
        try:
            return loads.begin("a", "two").result(LIMIT_S)
        except BusyError:
            time.sleep(0.05)
    raise AssertionError("loads are refused although no file system hangs")
