"""Full lists of several namespaces, some of which the operator may not list."""

import pytest

from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.store import DEPLOYMENT, MODEL_SERVICE, ServiceKey, Store
from tandem_operator.controller.watch import Resync
from tandem_testing.kube_objects import a_service

KINDS = (MODEL_SERVICE, DEPLOYMENT)


class Lists:
    """An API server with one service in each namespace."""

    def __init__(self):
        self.refused = {}

    async def list_all(self, kind, namespace, selector):
        error = self.refused.get((namespace, kind.name)) or self.refused.get((namespace, ""))
        if error is not None:
            raise error
        service = a_service("chat", metadata={"namespace": namespace, "uid": f"uid-{namespace}"})
        return ([service.body] if kind is MODEL_SERVICE else []), 10_000


def forbidden():
    return ApiError(403, "Forbidden", "cannot list resource")


@pytest.fixture
def lists():
    return Lists()


@pytest.fixture
def changed():
    return []


@pytest.fixture
def resync(lists, changed):
    return Resync(lists, Store(), KINDS, ("gone", "models"), changed.append)


def known(resync):
    return [name for name in ("gone", "models") if resync.knows(ServiceKey(name, "chat"))]


@pytest.mark.parametrize("kind", ["", DEPLOYMENT.name])
async def test_namespace_that_is_refused_is_left_out(resync, lists, changed, kind):
    """It kept an operator of others from becoming ready; what is half known is not acted on."""
    lists.refused = {("gone", kind): forbidden()}
    await resync.once()
    assert resync.synced.is_set()
    assert known(resync) == ["models"]
    lists.refused.clear()
    changed.clear()
    await resync.once()
    assert known(resync) == ["gone", "models"]
    assert ServiceKey("gone", "chat") in changed


async def test_all_namespaces_refused_is_an_error(resync, lists):
    lists.refused = {("gone", ""): forbidden(), ("models", ""): forbidden()}
    with pytest.raises(ApiError, match="403"):
        await resync.once()
    assert not resync.synced.is_set()


async def test_server_that_does_not_answer_is_an_error(resync, lists):
    lists.refused = {("models", ""): ApiError(0, "ClientConnectorError", "no answer")}
    with pytest.raises(ApiError, match="no answer"):
        await resync.once()
    assert not resync.synced.is_set()


async def test_namespace_that_was_listed_once_stays_known(resync, lists):
    """Its Role goes with it: events of its watches are handled until then."""
    await resync.once()
    lists.refused = {("gone", ""): forbidden()}
    await resync.once()
    assert known(resync) == ["gone", "models"]
