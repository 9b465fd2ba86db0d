"""What spans of gateways and workers say of where cached tokens were found."""

from tandem_engine.messages.outputs import CacheHits
from tandem_services.common import span_names as names


def hit_attributes(hits: CacheHits | None) -> dict[str, int]:
    """Of those that were not simply on the device, by place: only where there are some."""
    if hits is None:
        return {}
    tokens = {
        names.CACHED_HOST_TOKENS: hits.host,
        names.CACHED_DISK_TOKENS: hits.disk,
        names.CACHED_FETCHED_TOKENS: hits.fetched,
    }
    return {name: count for name, count in tokens.items() if count}
