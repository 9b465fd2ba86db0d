"""New weights for a running engine, of the same architecture.

    1. load    on a thread of its own, beside the old weights, while requests go on
    2. swap    between two steps, by the scheduler thread: `Engine.replace_model`

Memory must hold both sets of weights for a while; in return a checkpoint that is absent, damaged or of another
shape changes nothing. Requests that have begun end with a retryable error at the swap: an answer of two
models is no answer, and a gateway carries on what its client has on a worker of its choice (ADR 4).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine, LoadedModel, load
from tandem_engine.errors import BusyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Reloaded:
    """What a reload did."""

    path: str
    fingerprint: str
    ended: int
    """Requests that had begun, and were told to begin again."""


class WeightsReload:
    """At most one reload at a time. Scheduler thread only."""

    def __init__(self, *, engine: Engine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        """Of the weights that serve now."""
        self._thread: ThreadPoolExecutor | None = None
        self._loading: Future[LoadedModel] | None = None

    def start(self, path: str | None) -> None:
        """Begin to load `path`, or the folder that is being served.

        Raises `BusyError` during another reload, `ConfigError` for a model that several ranks share.
        """
        self._engine.require_replaceable()
        if self._loading is not None:
            raise BusyError("a reload is going on: wait until it has ended")
        config = self._config if path is None else replace(self._config, model_path=str(Path(path)))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload")
        self._loading = self._thread.submit(lambda: load(config, progress=False))

    def poll(self) -> Reloaded | None:
        """Swap when the weights are there. None while they load, or when nothing was asked for.

        Raises `CheckpointError` or `ConfigError` when the new weights cannot serve; the old ones go on.
        """
        if self._loading is None or not self._loading.done():
            return None
        loading, self._loading = self._loading, None
        loaded = loading.result()
        ended = self._engine.replace_model(loaded)
        self._config = replace(self._config, model_path=loaded.config.model_path)
        return Reloaded(path=loaded.config.model_path, fingerprint=loaded.model_config.fingerprint, ended=ended)

    def close(self) -> None:
        """Wait for a load that is going on, and forget it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
