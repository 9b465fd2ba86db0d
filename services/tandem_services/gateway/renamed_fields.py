"""Errors of a chat request in the words of the request that it was made from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem_engine.errors import InvalidRequestError
from tandem_services.common.errors import ApiError, bad_request


@contextmanager
def renamed_fields(name: Callable[[str | None], str | None]) -> Iterator[None]:
    """`ApiError`s and `InvalidRequestError`s of the block name fields as `name` does, and are all `ApiError`s."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error, name(error.param)) from error
    except InvalidRequestError as error:
        raise _renamed(bad_request(str(error), error.param), name(error.param)) from error


def _renamed(error: ApiError, param: str | None) -> ApiError:
    if param is None or param == error.param:
        return error
    message = str(error).replace(str(error.param), param)
    return ApiError(error.status, message, kind=error.kind, param=param, reason=error.reason)
