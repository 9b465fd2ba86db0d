"""Where a request found the part of its prompt that it need not compute."""

from tandem_engine.messages.outputs import CacheHits
from tandem_engine.scheduler.request import Request


def cache_hits(req: Request, page_size: int) -> CacheHits:
    """Of a request that holds its KV and has its `cached_tokens`, before its first step.

    The device has what comes first, then host memory, then files; what was fetched is on the device by now, at its end.
    What a resumed request finds of its output is not counted.
    """
    loaded = req.held_kv.loaded
    host, disk = loaded.host * page_size, loaded.disk * page_size
    on_device = min(req.cached_tokens, req.launched_len - host - disk)
    slower = req.cached_tokens - on_device
    fetched = 0 if req.fetched is None else req.fetched.pages * page_size
    return CacheHits(host=min(host, slower), disk=min(disk, max(0, slower - host)), fetched=min(fetched, on_device))
