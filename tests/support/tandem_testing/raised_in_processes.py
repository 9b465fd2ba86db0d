"""Raises an exception in a function of another process, armed through files.

    process   install(folder)             at its start, before its first thread
    test      faults = RemoteFaults(folder)
              with faults.learning(): …   functions that run in the block
              faults.names()
              faults.arm(name)            its next call raises `Planted`, in whichever thread
              faults.fallen()             names of the functions that raised, in order

Each call of a Python function is traced, and each resumption of a coroutine. The interpreter takes the hook off a
thread in which it has raised. A signal puts it back on the main thread, the next garbage collection on another one.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tandem_engine
import tandem_services
from tandem_testing.raised_anywhere import Planted
from tandem_testing.waiting import wait_for

PACKAGES = tuple(f"{Path(package.__file__ or '').parent.parent}/" for package in (tandem_engine, tandem_services))
POLL_S = 0.05
LEARN_S = 30.0


@dataclass(kw_only=True, slots=True)
class _Hook:
    """Of one process."""

    folder: Path
    names: dict[CodeType, str] = field(default_factory=dict)
    """Of code that has run; "" for code of other packages."""
    seen: set[str] = field(default_factory=set)
    armed: str = ""
    learning: bool = False
    raised: bool = False
    """Since the main thread was last traced again."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        name = self.names.get(code)
        if name is None:
            name = self.names[code] = _name(code)
        if not name or event != "call":
            return
        if self.learning:
            self.seen.add(name)
        if name == self.armed:
            self.armed = ""
            (self.folder / "armed").unlink(missing_ok=True)
            with (self.folder / "fallen").open("a", encoding="utf-8") as fallen:
                fallen.write(name + "\n")
            self.raised = True
            raise Planted(name)

    def on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            self.trace()

    def trace(self, *_: object) -> None:
        """The thread that calls this."""
        if sys.gettrace() is None:
            sys.settrace(self)

    def watch(self) -> None:
        order, written = "", 0
        while True:
            time.sleep(POLL_S)
            if self.raised:
                self.raised = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            former, order = order, _read(self.folder / "armed")
            if order != former:
                self.armed = order.partition(" ")[2]
            learning = (self.folder / "learn").exists()
            if learning and not self.learning:
                self.seen, written = set(), -1
            self.learning = learning
            if learning and len(self.seen) != written:
                written = len(self.seen)
                _replace(self.folder / "seen", "\n".join(sorted({*self.seen})))


def install(folder: Path) -> None:
    """In this process, for its life. `folder` exists."""
    hook = _Hook(folder=folder)
    # Before it traces threads: its own functions are of no product.
    threading.Thread(target=hook.watch, name="faults", daemon=True).start()
    gc.callbacks.append(hook.on_collection)
    signal.signal(signal.SIGUSR2, hook.trace)
    threading.settrace(hook)
    sys.settrace(hook)


@dataclass(frozen=True, slots=True)
class RemoteFaults:
    """The test's side."""

    folder: Path

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Collect the functions that run in the block."""
        (self.folder / "seen").unlink(missing_ok=True)
        (self.folder / "learn").touch()
        wait_for((self.folder / "seen").exists, LEARN_S)
        yield
        time.sleep(2 * POLL_S)
        (self.folder / "learn").unlink()

    def names(self) -> list[str]:
        return (self.folder / "seen").read_text("utf-8").split("\n")

    def arm(self, name: str) -> None:
        # No two orders are equal: the process may not have looked between them.
        _replace(self.folder / "armed", f"{time.monotonic_ns()} {name}")

    def disarm(self) -> None:
        (self.folder / "armed").unlink(missing_ok=True)

    def fallen(self) -> list[str]:
        """Over all processes that had this folder."""
        return _read(self.folder / "fallen").splitlines()


def _name(code: CodeType) -> str:
    """Module below the packages and qualified name; "" for code of other packages and for module bodies."""
    file = code.co_filename
    if not file.startswith(PACKAGES) or code.co_name == "<module>":
        return ""
    return f"{'/'.join(Path(file).parts[-2:])}:{code.co_qualname}:{code.co_firstlineno}"


def _read(path: Path) -> str:
    """Nothing where there is no such file."""
    with suppress(FileNotFoundError):
        return path.read_text("utf-8")
    return ""


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, "utf-8")
    draft.replace(path)
