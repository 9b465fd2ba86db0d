"""An engine in this process: model, KV memory, scheduler and, with a port, the transfer of KV to peers.

    load    checkpoint → `LoadedModel` (`loaded_model`), shared by any number of engines of one process
    build   `assembly`: pool, prefix cache, executor, scheduler; with an `EnginePort` also NIXL and the handoff stage
            (`peer_setup`)
    use     `add` / `abort` / `step` by the owner of the loop (`process`), or `generate` offline
    reload  other weights of the same architecture between two steps (`reload`), which changes `served`
    close   executor first, so that nothing computes any more; then the transport, then sockets

All methods of `Engine` belong to one thread, the scheduler thread.
"""

from tandem_engine.engine.engine import Engine
from tandem_engine.engine.peer_setup import EnginePort

__all__ = ["Engine", "EnginePort"]
