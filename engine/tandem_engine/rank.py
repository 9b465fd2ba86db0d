"""A rank that is not the first: the same engine as rank 0's, without sockets, doing what rank 0 does.

Start   order from standard input → meet the other ranks → load this rank's weights → build → self-test → warm up
Turn    wait for rank 0's turn → take the same inputs → plan, launch and settle the same step; say nothing
Stop    rank 0 closes the engine; or the process that started this one is gone, which standard input shows by its end

Signals are rank 0's business: a terminal or service manager sends them to every process of a group, and a rank
that left at once would look like one that was lost.
"""

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from tandem_engine.engine import Engine
from tandem_engine.errors import EngineError
from tandem_engine.ipc.own_folder import remove
from tandem_engine.launch import watch_compiler
from tandem_engine.loaded_model import load
from tandem_engine.parallel.devices import device_of_rank
from tandem_engine.parallel.nodes.leader import follows_key
from tandem_engine.parallel.rank_processes import RankOrder, announce
from tandem_engine.parallel.torch_group import join_ranks
from tandem_engine.scheduler.stream import discard

log = logging.getLogger(__name__)

REFUSED = 3
UNEXPECTED_ERROR = 70
"""Exit status, EX_SOFTWARE of sysexits."""
ORPHANED = 71
"""Exit status when rank 0 is gone."""
ORPHAN_S = 0.2
"""How long after an error it may take to notice that rank 0 is gone: its process closes all it has at once."""


def run_rank(standard_input: BinaryIO) -> int:
    """Be the rank that the order on `standard_input` describes; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    order = msgspec.json.decode(standard_input.readline(), type=RankOrder)
    lifeline = threading.Thread(
        target=_leave_with_rank_0, args=(standard_input, Path(order.folder)), name="lifeline", daemon=True
    )
    lifeline.start()
    try:
        _follow(order)
    except EngineError as error:
        # Where rank 0 is gone, which its closed connections show first, there is nobody to tell.
        lifeline.join(ORPHAN_S)
        order.last_words.write_text(str(error), "utf-8")
        return REFUSED
    except Exception as error:
        log.exception("rank %d stopped by an unexpected error", order.rank)
        order.last_words.write_text(f"{type(error).__name__}: {error}", "utf-8")
        return UNEXPECTED_ERROR
    return 0


def _follow(order: RankOrder) -> None:
    config = order.engine
    store = order.open_store()
    announce(store, order.rank)
    parallel = join_ranks(
        store,
        rank=order.rank,
        size=config.parallel.tp_size,
        device=torch.device(device_of_rank(config.device, config.parallel.local_rank(order.rank))),
        timeout_s=config.parallel.timeout,
        host=None if order.meeting is None else order.meeting.host,
    )
    watch_compiler(config)
    loaded = load(config, progress=False, parallel=parallel)
    with Engine.build(loaded, loaded.config, sink=discard) as engine:
        if order.self_test:
            engine.self_test()
            engine.warm_up()
        store.set(follows_key(order.rank), "1")
        engine.follow()


def _leave_with_rank_0(standard_input: BinaryIO, folder: Path) -> None:
    """Rank 0 writes nothing after the order, so reading ends when its end of the pipe does.

    The process may be waiting in a collective for a rank that will never come, so it leaves from here.
    """
    standard_input.read()
    remove(folder)
    sys.stderr.flush()
    os._exit(ORPHANED)
