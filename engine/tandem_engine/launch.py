"""An engine with all of its ranks: what a caller needs who does not want to know how many there are.

checks that need no other process ─▶ other ranks start ─▶ load ─▶ build ─▶ the caller's use
ranks end ◀─ the engine closes, which tells them ◀────────────────────────────┘
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine, EnginePort, load, require_loadable
from tandem_engine.parallel.rank_processes import other_ranks
from tandem_engine.scheduler.stream import Sink


@contextmanager
def launched_engine(
    config: EngineConfig,
    *,
    progress: bool,
    self_test: bool = False,
    sink: Sink | None = None,
    port: EnginePort | None = None,
) -> Iterator[Engine]:
    """Load and build the engine that `config` describes, on as many ranks as it asks for.

    Args:
        progress: show a bar while weights are read.
        self_test: the caller calls `Engine.self_test` before anything else; with several ranks all take part.
        sink, port: see `Engine.build`.

    Raises:
        ConfigError, CheckpointError: the configuration or the checkpoint cannot work.
        RankLostError: a rank could not start, or ended while the engine was in use.
    """
    if config.parallel.tp_size > 1:
        require_loadable(config)
    with other_ranks(config, self_test=self_test) as parallel:
        loaded = load(config, progress=progress, parallel=parallel)
        with Engine.build(loaded, loaded.config, sink=sink, port=port) as engine:
            yield engine
