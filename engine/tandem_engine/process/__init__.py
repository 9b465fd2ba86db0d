"""The engine as a process: sockets in, engine step, outputs out, until told to stop.

Start   `serve`: load model → build engine → self-test → bind the request socket → `EngineReady` to the worker service
Turn    `loop`: gateways' requests → worker's orders → one scheduler step → `reports`: KV events, stats
Idle    sleep on all sockets and the transport's descriptor, also while requests wait; nothing spins
Stop    SIGTERM, `Shutdown`, or the worker service gone: abort what is left, tell every client, close

Everything runs on one thread, the scheduler's; the forward and NIXL have threads of their own.
"""
