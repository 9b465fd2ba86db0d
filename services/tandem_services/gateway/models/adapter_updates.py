"""Loads and unloads an adapter on all workers of one model service.

    load    1. one worker reads the folder: its digest is what the name stands for from now on
            2. all others load it, and refuse files with another digest
            3. a worker that cannot be reached is tried again. One that has left the fleet no longer counts
            4. if a worker has failed, those that have newly loaded the adapter unload it, and so do those that may have
    unload  all workers at once. One that does not have the adapter has nothing to do

The name is then registered, for workers that start later: they load the adapter for the first request that needs it. An
unloaded name is first removed there.

A replaced adapter is not restored after a failure: requests may have begun with the new one. Repeating a command
continues it: a worker that has the adapter answers at once, without an effect.

Commands of one gateway run one after the other; one that would wait for longer than `TURN_S` is refused. Those of two
gateways meet at the workers: each has the digest of what it is about, so none undoes what the other has done.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tandem_engine.base.errors import CheckpointError, ConfigError
from tandem_engine.base.logs import quoted
from tandem_engine.config import Role
from tandem_engine.config.adapters import check_adapter_name
from tandem_engine.messages.control import ServedAdapter
from tandem_services.common.errors import ApiError, bad_request, not_found, unavailable
from tandem_services.common.tasks import run_periodically
from tandem_services.gateway.models.model import ServedModel
from tandem_services.gateway.models.worker_commands import (
    LoadedThere,
    WorkerCommands,
    WorkerRejectedError,
    WorkerSilentError,
)
from tandem_services.router.decision import WorkerView
from tandem_services.router.keys import HEARTBEAT_S
from tandem_services.router.registered_adapters import MAX_NAMES, RegisteredAdapters

logger = logging.getLogger(__name__)

LOAD_S = 1830.0
"""A little more than a worker gives its engine."""

UNLOAD_S = 35.0
"""The same; a step that is being computed has to end first."""

TURN_S = 30.0
"""The longest wait for the command before. A worker whose engine hangs takes all of `LOAD_S`."""

TRIES = 3
RETRY_S = 0.5
RETRY_AFTER_S = 2.0

POLL_S = 0.05
VIEW_POLLS = 100
"""A view of the fleet that contains the change is awaited for so long: a client may use the name at once."""

MAX_NAMED = 4
"""Workers named in one error."""

R = TypeVar("R")
BUSY, MISSING = "busy", "adapter_missing"


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command has done on one worker."""

    worker: str
    state: str
    """loaded, replaced or unchanged; unloaded or absent."""


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a command has done."""

    message: str
    model: str
    lora_name: str
    digest: str
    workers: list[WorkerResult]


class WorkersFailedError(ApiError):
    """Workers have not carried out the command. `failed`: reason by worker."""

    def __init__(self, error: ApiError, failed: Mapping[str, str]) -> None:
        super().__init__(error.status, str(error), kind=error.kind, param=error.param, retry_after=error.retry_after)
        self.failed = failed


class _Failed(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    error: WorkerRejectedError | WorkerSilentError

    @property
    def silent(self) -> bool:
        """Whether it may have been carried out all the same."""
        return isinstance(self.error, WorkerSilentError)

    @property
    def missing(self) -> bool:
        """The worker does not have the adapter."""
        return isinstance(self.error, WorkerRejectedError) and self.error.code == MISSING


@dataclass(kw_only=True, slots=True)
class AdapterUpdates:
    """Of one model service. Belongs to its event loop."""

    model: ServedModel
    registered: RegisteredAdapters
    commands: WorkerCommands
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Stay synchronized with the other gateways until canceled."""
        problem = "cannot synchronize registered adapters"
        await run_periodically(self._synchronize, every_s=HEARTBEAT_S, logger=logger, failure=problem, at_once=True)

    async def _synchronize(self) -> None:
        reported = self.model.reported_adapters()
        if reported is not None:
            self.registered.note(reported)
        await self.registered.sync()

    async def load(
        self, name: str, path: str, *, replaces: bool, pinned: bool = False, digest: str = ""
    ) -> AdapterChange:
        """`digest`: other content is refused; "" for any.

        Raises `ApiError`: 400 for an adapter that cannot be loaded, 503 where workers fail or are busy.
        """
        async with self._turn():
            return await self._load(name, path, replaces=replaces, pinned=pinned, required=digest)

    async def unload(self, name: str) -> AdapterChange:
        """Raises `ApiError`: 404 where no worker has it, 503 where workers fail or are busy."""
        async with self._turn():
            return await self._unload(name)

    async def announce(self, names: Sequence[str]) -> None:
        """These are expected from now on, and no others. Raises `ApiError` 400 for what is no name."""
        for name in names:
            try:
                check_adapter_name(name)
            except ConfigError as error:
                raise bad_request(str(error), "lora_names") from error
        await self.registered.announce(names)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """The block runs alone. Raises `ApiError` 503 when the command before does not end."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._one_at_a_time.acquire()
        except TimeoutError:
            raise unavailable(
                "Another command about an adapter is running. Try again later.", retry_after=TURN_S
            ) from None
        try:
            yield
        finally:
            self._one_at_a_time.release()

    async def _load(self, name: str, path: str, *, replaces: bool, pinned: bool, required: str) -> AdapterChange:
        await self.registered.sync()
        entry = self.registered.find(name)
        if entry is None and self.registered.full:
            raise unavailable(f"{MAX_NAMES} names of adapters are registered: unload some.", retry_after=RETRY_AFTER_S)
        done: dict[str, LoadedThere] = {}
        failed: dict[str, _Failed] = {}

        async def load_on(worker: WorkerView, digest: str) -> None:
            async def command() -> LoadedThere:
                return await self.commands.load(
                    worker, name=name, path=path, replaces=replaces, digest=digest, within_s=LOAD_S, pinned=pinned
                )

            outcome = await self._carry_out(worker, command)
            if isinstance(outcome, _Failed):
                failed[worker.incarnation] = outcome
            elif outcome is not None:
                done[worker.incarnation] = outcome

        for reader in self._workers():
            # A registered name is replaced on purpose only.
            await load_on(reader, required or ("" if entry is None or replaces else entry.digest))
            if done:
                break
            if (failure := failed.get(reader.incarnation)) is not None and isinstance(
                failure.error, WorkerRejectedError
            ):
                raise WorkersFailedError(_rejected(failure.error), {failure.worker: str(failure.error)})
        if not done:
            raise self._no_reader(failed.values())
        first = next(iter(done.values()))
        digest = first.digest
        adapter = ServedAdapter(name=name, digest=digest, rank=first.rank, root=first.root, size=first.size)
        if entry is not None and entry.digest != digest:
            # Others may have requests of the new one from now on.
            await self.registered.register(adapter, source=path)
        while waiting := [w for w in self._workers() if w.incarnation not in done and w.incarnation not in failed]:
            # Again for those that have joined since.
            await asyncio.gather(*(load_on(worker, digest) for worker in waiting))
        present = {worker.incarnation for worker in self._workers()}
        still_failed = {incarnation: each for incarnation, each in failed.items() if incarnation in present}
        if still_failed:
            fresh = [incarnation for incarnation, loaded in done.items() if not loaded.former]
            kept = await self._undo(fresh, name, digest)
            # Whether these have loaded it is not known. They are reported in any case.
            await self._undo([key for key, each in still_failed.items() if each.silent], name, digest)
            raise _incomplete(still_failed.values(), undone=len(fresh) == len(done) and not kept)
        await self.registered.register(adapter, source=path)
        await self._until_seen(lambda: self._digest_of(name) == digest)
        logger.info("adapter loaded", extra={"fields": {"adapter": name, "digest": digest, "workers": len(done)}})
        states = {incarnation: _state(loaded) for incarnation, loaded in done.items()}
        return self._change(f"Success: LoRA adapter '{name}' added successfully.", name, digest, states)

    async def _unload(self, name: str) -> AdapterChange:
        await self.registered.sync()
        workers = self._workers()
        digest, states, failed = self._digest_of(name), dict[str, str](), list[_Failed]()
        removed = await self.registered.remove(name)
        last = self.registered.last_digest(name)
        cached = "" if self.registered.has(last) else last

        async def unload_on(worker: WorkerView) -> None:
            nonlocal digest

            # A release that reports no memory loads nothing for requests, and refuses the field.
            loaded = cached if worker.adapter_memory is not None else ""

            async def command() -> str:
                return await self.commands.unload(worker, name=name, digest="", cached=loaded, within_s=UNLOAD_S)

            outcome = await self._carry_out(worker, command)
            if isinstance(outcome, str):
                digest, states[worker.incarnation] = digest or outcome, "unloaded"
            elif isinstance(outcome, _Failed) and outcome.missing:
                states[worker.incarnation] = "absent"
            elif outcome is not None:
                failed.append(outcome)

        await asyncio.gather(*map(unload_on, workers))
        if failed:
            first = failed[0].error
            if len(failed) == len(workers) and isinstance(first, WorkerRejectedError):
                raise _rejected(first)
            raise _incomplete(failed, undone=len(failed) == len(workers))
        if "unloaded" not in states.values() and not removed:
            raise not_found(f"The adapter '{quoted(name)}' is not loaded.", "lora_name", reason="model_not_found")
        await self._until_seen(lambda: not self._digest_of(name))
        logger.info("adapter unloaded", extra={"fields": {"adapter": name, "digest": digest}})
        return self._change(f"Success: LoRA adapter '{name}' removed successfully.", name, digest, states)

    def _workers(self) -> list[WorkerView]:
        """Those of the model, whether they take new requests or not: first those that generate."""
        own = [worker for worker in self.model.workers() if worker.model == self.model.name]
        return sorted(own, key=lambda worker: (worker.role is Role.PREFILL, worker.worker_id, worker.incarnation))

    async def _carry_out(self, worker: WorkerView, command: Callable[[], Awaitable[R]]) -> R | _Failed | None:
        """What `command` returns; None where the worker has left the fleet."""
        for attempt in range(1, TRIES + 1):
            try:
                return await command()
            except WorkerRejectedError as error:
                return _Failed(worker=worker.worker_id, error=error)
            except WorkerSilentError as error:
                fields = {"worker": worker.incarnation, "endpoint": worker.health_endpoint, "error": str(error)}
                logger.warning("no reply of a worker to a command about an adapter", extra={"fields": fields})
                if attempt == TRIES or not error.again:
                    return _Failed(worker=worker.worker_id, error=error)
            await asyncio.sleep(RETRY_S)
            if worker.incarnation not in {each.incarnation for each in self._workers()}:
                return None
        return None

    async def _undo(self, incarnations: Iterable[str], name: str, digest: str) -> bool:
        """Unload what has newly been loaded. Whether some worker may still have it."""
        workers = [worker for worker in self._workers() if worker.incarnation in set(incarnations)]

        async def undo_on(worker: WorkerView) -> bool:
            async def command() -> str:
                return await self.commands.unload(worker, name=name, digest=digest, cached="", within_s=UNLOAD_S)

            outcome = await self._carry_out(worker, command)
            return isinstance(outcome, _Failed) and not outcome.missing

        return any(await asyncio.gather(*map(undo_on, workers)))

    def _digest_of(self, name: str) -> str:
        """Of what the name stands for; "" for nothing."""
        adapter = self.model.adapters.find(name)
        return "" if adapter is None else adapter.digest

    async def _until_seen(self, seen: Callable[[], bool]) -> None:
        for _ in range(VIEW_POLLS):
            if seen():
                return
            await asyncio.sleep(POLL_S)
        logger.warning("workers have carried out a command about an adapter, but the view of the fleet is older")

    def _no_reader(self, failed: Iterable[_Failed]) -> ApiError:
        failures = [*failed]
        if failures:
            return _incomplete(failures, undone=True)
        return unavailable("No worker can load the adapter now. Try again later.", retry_after=RETRY_AFTER_S)

    def _change(self, message: str, name: str, digest: str, states: dict[str, str]) -> AdapterChange:
        workers = [
            WorkerResult(worker=incarnation.rpartition("@")[0], state=state)
            for incarnation, state in sorted(states.items())
        ]
        return AdapterChange(message=message, model=self.model.name, lora_name=name, digest=digest, workers=workers)


def _state(loaded: LoadedThere) -> str:
    if not loaded.former:
        return "loaded"
    return "unchanged" if loaded.former == loaded.digest else "replaced"


def _rejected(error: WorkerRejectedError) -> ApiError:
    """Of the worker that was to read the folder: nothing has changed."""
    if error.code == BUSY:
        return unavailable(str(error), retry_after=RETRY_AFTER_S)
    message = str(error)
    of_path = error.code == CheckpointError.code or "--lora-dir" in message
    param = "lora_name" if message.startswith("lora_name") else "lora_path" if of_path else None
    return bad_request(message, param)


def _incomplete(failed: Iterable[_Failed], *, undone: bool) -> ApiError:
    failures = sorted(failed, key=lambda each: each.worker)
    named = "; ".join(f"{each.worker}: {each.error}" for each in failures[:MAX_NAMED])
    more = f"; and {len(failures) - MAX_NAMED} more" if len(failures) > MAX_NAMED else ""
    effect = "No other worker has changed." if undone else "Other workers have carried it out: repeat the command."
    error = unavailable(
        f"{len(failures)} workers have not carried out the command ({named}{more}). {effect}",
        retry_after=RETRY_AFTER_S,
    )
    return WorkersFailedError(error, {each.worker: str(each.error) for each in failures})
