"""The model that a caller of the library names: a folder, or a repository of a Hugging Face hub."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from tandem_engine.checkpoint_source.resolve import Needs, resolve
from tandem_engine.checkpoint_source.source import parse
from tandem_engine.config import EngineConfig, LoadFormat

logger = logging.getLogger(__name__)


def with_folder(config: EngineConfig, model: str | Path, *, progress: bool) -> EngineConfig:
    """`config` with the folder of `model`, which is downloaded if it is org/name[@revision] and not in the cache.

    Raises:
        ConfigError: `model` is neither, cannot be served or cannot be fetched.
    """
    source = parse(model) if isinstance(model, str) else None
    if source is None or source.folder is not None:
        folder = Path(model) if source is None or source.folder is None else source.folder
        return replace(config, model_path=str(folder))
    needs = Needs(impl=config.model_impl, weights=config.load_format is not LoadFormat.DUMMY)
    bar = _Bar(source.repo, shown=progress)
    try:
        found = resolve(source, offline=False, report=bar, needs=needs)
    finally:
        bar.close()
    return replace(config, model_path=str(found.folder))


class _Bar:
    """A report that shows a bar, if anything is downloaded; lines go to the log."""

    def __init__(self, what: str, *, shown: bool) -> None:
        self._what, self._shown = what, shown
        self._bar: tqdm[NoReturn] | None = None

    def say(self, line: str) -> None:
        logger.warning(line)

    def progress(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc=self._what, unit="B", unit_scale=True, disable=not self._shown)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
