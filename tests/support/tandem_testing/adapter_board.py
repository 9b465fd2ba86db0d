"""The texts about adapters that gateways share through Redis, without a Redis: implements `AdapterBoard`."""

from collections.abc import Iterable

from tandem_services.common.redis_client import RedisUnavailableError


class SharedTexts:
    """The function of scripts/adapters.lua on a dict."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.calls = 0
        self.away = False

    async def sync(self, changes: Iterable[tuple[str, str, str]] = ()) -> dict[str, str]:
        self.calls += 1
        if self.away:
            raise RedisUnavailableError("planned")
        for name, before, after in changes:
            if self.texts.get(name, "") == before:
                self.texts.pop(name, None)
                if after:
                    self.texts[name] = after
        return dict(self.texts)
