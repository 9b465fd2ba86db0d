"""The texts about adapters that gateways share through Redis, without a Redis: implements `AdapterBoard`."""

from collections.abc import Callable, Iterable

from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.router.deployment import Deployment
from tandem_services.router.registered_adapters import RegisteredAdapters


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


def gateways_of(board: SharedTexts, *, model: str) -> Callable[..., RegisteredAdapters]:
    """Makes what a gateway knows, each of one deployment and of `model`, unless it gets others."""
    deployment = Deployment.of(KeyPair.generate())

    def make(*, of: Deployment = deployment, model: str = model) -> RegisteredAdapters:
        return RegisteredAdapters(model=model, deployment=of, board=board)

    return make
