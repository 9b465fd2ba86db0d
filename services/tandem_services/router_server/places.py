"""A bound on what is done at once: who comes when all places are taken is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tandem_services.common.errors import ApiError

RETRY_S = 1.0


@dataclass(kw_only=True, slots=True)
class Places:
    """`most` of them, for `what`."""

    most: int
    what: str
    taken: int = field(default=0, init=False)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Raises `ApiError` 429 when there is none left."""
        self.take(1)
        try:
            yield
        finally:
            self.give(1)

    def take(self, count: int) -> None:
        """Raises `ApiError` 429 when there are not so many left."""
        if self.taken + count > self.most:
            raise ApiError(
                429,
                f"This router takes at most {self.most} {self.what} at once. Try again later.",
                kind="RateLimitError",
                reason="router_busy",
                retry_after=RETRY_S,
            )
        self.taken += count

    def give(self, count: int) -> None:
        self.taken -= count
