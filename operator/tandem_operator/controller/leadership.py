"""Carries out an election: renews the Lease, tells when leadership begins and ends, and guards every write."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from tandem_operator.builders.containers import Manifest
from tandem_operator.controller.cluster import ApiError
from tandem_operator.controller.election import Election
from tandem_operator.controller.kinds import LEASE
from tandem_operator.planning.observed import Ref

logger = logging.getLogger(__name__)


class NotLeading(Exception):  # noqa: N818 - it says what is so
    """A write was stopped: another operator leads, or this one may not be sure that it does."""


class LeaseClient(Protocol):
    """What an election asks of the API server."""

    async def get(self, ref: Ref, namespace: str) -> Manifest | None: ...

    async def create(self, manifest: Manifest) -> Manifest: ...

    async def replace(self, manifest: Manifest) -> Manifest: ...


class Leadership:
    """`run` it. `began` and `ended` are called as leadership comes and goes."""

    def __init__(
        self,
        election: Election,
        client: LeaseClient,
        *,
        began: Callable[[], None],
        ended: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._election = election
        self._client = client
        self._began = began
        self._ended = ended
        self._clock = clock
        self._pause = pause
        self._acting = False

    @property
    def leading(self) -> bool:
        return self._election.leading()

    def check(self) -> None:
        """Raises `NotLeading` unless it may act right now."""
        if not self._election.leading():
            raise NotLeading("this operator does not hold the lease")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.turn()
            await self._pause(self._election.config.retry_s)

    async def turn(self) -> None:
        """One attempt to get or to keep the Lease. It never outlasts the renew deadline."""
        try:
            async with asyncio.timeout(self._election.config.renew_deadline_s / 2):
                await self._attempt()
        except (ApiError, TimeoutError) as error:
            logger.warning("cannot renew the lease: %s", str(error) or "no answer in time")
        self._announce()

    async def resign(self) -> None:
        """Stop acting and let another begin at once."""
        was = self._election.leading()
        self._election.release()
        self._announce()
        if not was:
            return
        lease = await self._client.get(self._ref, self._election.config.namespace)
        resignation = self._election.resignation(lease) if lease is not None else None
        if resignation is not None:
            await self._client.replace(resignation)

    @property
    def _ref(self) -> Ref:
        return LEASE.ref(self._election.config.name)

    async def _attempt(self) -> None:
        lease = await self._client.get(self._ref, self._election.config.namespace)
        wanted = self._election.attempt(lease)
        if wanted is None:
            return
        begun = self._clock()
        try:
            written = await (self._client.create(wanted) if lease is None else self._client.replace(wanted))
        except ApiError as error:
            if not error.conflict:
                raise
            # Somebody else was faster; the next turn reads who.
            return
        self._election.wrote(written, begun)

    def _announce(self) -> None:
        leading = self._election.leading()
        if leading == self._acting:
            return
        self._acting = leading
        if leading:
            logger.info("acquired leadership", extra={"identity": self._election.config.identity})
            self._began()
        else:
            logger.warning("lost leadership", extra={"holder": self._election.holder})
            self._ended()
