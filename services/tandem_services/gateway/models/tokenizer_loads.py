"""Loads tokenizers, and remembers which cannot be loaded: parsing one takes seconds of CPU and holds the GIL.

    load    a version that failed is parsed again after a pause that doubles with each failure, up to `MAX_PAUSE_S`;
            until then the same error is raised at once
    check   raises that error where the version is known before its files are fetched

A version is the digest of a tokenizer that workers have sent, or the signature of files. Another version of a model's
tokenizer is loaded at once, and the former one is forgotten.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem_engine.base.clock import Clock
from tandem_engine.base.errors import CheckpointError
from tandem_engine.tokenizer.bundle import OPTIONAL, REQUIRED
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.file_watcher import signature_of
from tandem_services.common.metrics import MetricFamilies

FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 300.0

MAX_FAILURES = 1024
"""Models whose failures are remembered; the oldest failure is forgotten."""


class TokenizerLoadError(CheckpointError):
    """The files of a tokenizer are there and cannot be used."""


@dataclass(slots=True)
class _Failure:
    version: str
    reason: str
    pause_s: float
    retry_at: float


def _ignored(_model: str) -> None:
    """No metric."""


@dataclass(kw_only=True, slots=True)
class TokenizerLoads:
    """Of all models of a process. Belongs to one event loop."""

    clock: Clock
    on_failure: Callable[[str], None] = _ignored
    """Called with the model's name whenever a tokenizer cannot be loaded."""
    _failures: dict[str, _Failure] = field(default_factory=dict)
    """By the model's name, oldest first."""

    def check(self, model: str, version: str) -> None:
        """Raises `TokenizerLoadError` while this version is not to be parsed again."""
        failure = self._failures.get(model)
        if failure is not None and failure.version == version and self.clock.now() < failure.retry_at:
            raise TokenizerLoadError(failure.reason)

    async def load(self, model: str, version: str, folder: Path) -> TextTokenizer:
        """The tokenizer in `folder`. Raises `TokenizerLoadError`."""
        self.check(model, version)
        try:
            tokenizer = await asyncio.to_thread(_loaded, folder)
        except CheckpointError as error:
            self._failed(model, version, str(error))
            raise TokenizerLoadError(str(error)) from error
        self._failures.pop(model, None)
        return tokenizer

    async def load_folder(self, model: str, folder: Path) -> TextTokenizer:
        """As `load`: files that have changed are another version."""
        return await self.load(model, await asyncio.to_thread(_signature, folder), folder)

    def _failed(self, model: str, version: str, reason: str) -> None:
        former = self._failures.pop(model, None)
        repeated = former is not None and former.version == version
        pause_s = min(MAX_PAUSE_S, former.pause_s * 2) if former is not None and repeated else FIRST_PAUSE_S
        self._failures[model] = _Failure(version, reason, pause_s, self.clock.now() + pause_s)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self.on_failure(model)


def counted_loads(families: MetricFamilies, clock: Clock) -> TokenizerLoads:
    """Those of a gateway."""
    failures = families.counter(
        "tandem_gateway_tokenizer_load_failures", "Tokenizers that were parsed and cannot be used", ["model_name"]
    )
    return TokenizerLoads(clock=clock, on_failure=lambda model: failures.series(model).inc())


def _loaded(folder: Path) -> TextTokenizer:
    """Raises `CheckpointError`, whatever the tokenizer raises: a panic of one in Rust is no `Exception`."""
    try:
        return TextTokenizer.load(folder)
    except CheckpointError:
        raise
    except BaseException as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error


def _signature(folder: Path) -> str:
    """Of the files that a tokenizer is read from, and may be."""
    files = [folder / name for name in sorted((*REQUIRED, *OPTIONAL))]
    try:
        return str(signature_of(file for file in files if file.exists()))
    except OSError as error:
        return str(error)
