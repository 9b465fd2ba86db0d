"""The tokenizer of a model whose files the gateway does not have (`--model fleet`): from workers, or from Redis.

    1. digest    of the tokenizer that most offered workers report in their signed rows; without a worker, that of the
                 signed copy in Redis
    2. cached    a folder with these files, if an earlier process has kept it; its content is compared with the digest
    3. received  in parts from one of these workers, over its authenticated socket; then from the copy in Redis
    4. kept      in a folder named by the digest, which only this user reads; and in Redis

Nothing that is received counts unless it has the digest. `preferred` also tells when the workers of a running model
have other files: the model is then opened again (`catalog.LiveModels`). Until then the router sends requests to all of
them whose `tokenizer.json` is the same, and to no others.
"""

import asyncio
import errno
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tandem_engine.base.errors import CheckpointError, ConfigError, WireError
from tandem_engine.base.logs import quoted
from tandem_engine.config.transfer import Role
from tandem_engine.ipc.async_channels import AsyncDealerChannel
from tandem_engine.ipc.channels import IpcContext
from tandem_engine.messages.outputs import EngineReply, TokenizerPart
from tandem_engine.messages.requests import EngineRequest, TokenizerRequest
from tandem_engine.tokenizer.bundle import MAX_BUNDLE_BYTES, PART_BYTES, TokenizerBundle
from tandem_services.common.private_folder import private_folder
from tandem_services.common.redis_client import RedisUnavailableError
from tandem_services.gateway.models.tokenizer_loads import TokenizerLoads
from tandem_services.router.decision import WorkerView
from tandem_services.router.shared_state import TokenizerCopy

logger = logging.getLogger(__name__)

PART_S = 5.0
"""For one part: a step that is being computed has to end first."""

BUNDLE_S = 20.0
"""For all of them."""

MAX_ASKED = 2
"""Workers that are asked in one attempt."""

MAX_CACHE_BYTES = 2 << 30
"""Of the folder of tokenizers. Those that were not used for longest are removed."""

PARTIAL_S = 3600.0
"""No process writes one folder for that long."""


class TokenizerMissingError(ConfigError):
    """No worker has sent the tokenizer yet, and Redis has no copy: the attempt is repeated."""


@dataclass(frozen=True, slots=True)
class FoundTokenizer:
    """In a folder of its own, which may be removed once it is loaded."""

    digest: str
    encoding: str
    """Digest of `tokenizer.json` alone."""
    folder: Path


def preferred(workers: Iterable[WorkerView], model: str, *, current: str = "") -> str:
    """Digest of the tokenizer that most of `workers` report for `model`; `current` if as many report it, or none any.

    One that only prefill workers report comes last: those of a new revision may be the majority before one of its
    decode workers is ready, and alone they generate nothing.
    """
    reporting = [worker for worker in workers if worker.model == model and worker.tokenizer]
    if not reporting:
        return current
    counts = Counter(worker.tokenizer for worker in reporting)
    generating = {worker.tokenizer for worker in reporting if worker.role is not Role.PREFILL}
    return max(counts, key=lambda digest: (digest in generating, counts[digest], digest == current, digest))


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetTokenizer:
    """Of one model."""

    model: str
    context: IpcContext
    copy: TokenizerCopy
    loads: TokenizerLoads

    async def find(self, offered: Sequence[WorkerView], others: Sequence[WorkerView]) -> FoundTokenizer:
        """`offered`: workers that requests may be sent to; `others`: in any state, used where there are none.

        Raises `TokenizerMissingError`, `TokenizerLoadError` for one that could not be loaded a moment ago, and
        `ConfigError` where it cannot be kept.
        """
        digest = preferred(offered, self.model) or preferred(others, self.model)
        if not digest:
            return await self._of_copy([each for each in (*offered, *others) if each.model == self.model])
        self.loads.check(self.model, digest)
        cached = await asyncio.to_thread(_cached, digest)
        if cached is not None:
            return cached
        reasons = []
        for worker in self._asked(digest, offered, others):
            try:
                bundle = await received(worker, self.context)
            except (CheckpointError, WireError, TimeoutError) as error:
                reasons.append(f"{worker.worker_id}: {str(error) or 'no reply in time'}")
                continue
            logger.info("received the tokenizer of %s from %s", quoted(self.model), worker.incarnation)
            return await self._kept(bundle)
        copied = await self._copied()
        if copied is not None and copied.digest == digest:
            logger.info("read the tokenizer of %s from Redis: no worker sends it", quoted(self.model))
            return await self._kept(copied)
        raise TokenizerMissingError(
            f"waiting for a worker to send the tokenizer of model {quoted(self.model)}: {quoted('; '.join(reasons))}"
        )

    async def keep_copy(self, digest: str) -> None:
        """Redis has a copy of the tokenizer with this digest, as far as it is there. Raises `CheckpointError`."""

        def read() -> TokenizerBundle:
            found = _cached(digest)
            if found is None:
                raise CheckpointError(f"tokenizer {digest} is not in the folder of tokenizers any more")
            return TokenizerBundle.read(found.folder)

        try:
            await self.copy.keep(digest, read)
        except RedisUnavailableError:
            return  # it is logged, and written the next time

    def _asked(self, digest: str, offered: Sequence[WorkerView], others: Sequence[WorkerView]) -> Iterator[WorkerView]:
        """Other ones in each attempt, so that some that do not answer keep no gateway waiting, and gateways that start
        together do not all take it from one."""
        holders = [
            {each.incarnation: each for each in views if each.model == self.model and each.tokenizer == digest}
            for views in (offered, others)
        ]
        first = random.sample(list(holders[0].values()), len(holders[0]))
        rest = [each for name, each in holders[1].items() if name not in holders[0]]
        return islice((*first, *random.sample(rest, len(rest))), MAX_ASKED)

    async def _of_copy(self, workers: Sequence[WorkerView]) -> FoundTokenizer:
        copied = await self._copied()
        if copied is not None:
            self.loads.check(self.model, copied.digest)
            logger.info("read the tokenizer of %s from Redis: no worker reports one", quoted(self.model))
            return await self._kept(copied)
        why = "none is registered"
        if workers:
            why = "those registered have none to send: update them, or give the gateway the model's folder"
        raise TokenizerMissingError(f"waiting for a worker to send the tokenizer of model {quoted(self.model)}: {why}")

    async def _copied(self) -> TokenizerBundle | None:
        try:
            return await self.copy.read()
        except RedisUnavailableError:
            return None

    async def _kept(self, bundle: TokenizerBundle) -> FoundTokenizer:
        try:
            return await asyncio.to_thread(_keep, bundle)
        except OSError as error:
            raise ConfigError(
                f"cannot keep the tokenizer of model {quoted(self.model)} below {tempfile.gettempdir()}: {error}"
            ) from error


async def received(worker: WorkerView, context: IpcContext) -> TokenizerBundle:
    """The bundle that `worker` reports. Raises `CheckpointError`, `WireError` and `TimeoutError`."""
    channel: AsyncDealerChannel[EngineReply, EngineRequest] = AsyncDealerChannel(
        context, worker.request_endpoint, inbound=EngineReply, outbound=EngineRequest
    )
    data = bytearray()
    try:
        async with asyncio.timeout(BUNDLE_S):
            while True:
                part = await _part(channel, worker.tokenizer, len(data))
                data += part.data
                if len(data) == part.total:
                    break
    finally:
        channel.close()
    return await asyncio.to_thread(TokenizerBundle.verified, bytes(data), worker.tokenizer)


async def _part(channel: AsyncDealerChannel[EngineReply, EngineRequest], digest: str, offset: int) -> TokenizerPart:
    channel.send(TokenizerRequest(digest=digest, offset=offset))
    async with asyncio.timeout(PART_S):
        reply = await _answer(channel, offset)
    if not 0 < reply.total <= MAX_BUNDLE_BYTES + PART_BYTES:
        raise CheckpointError(f"it does not have the tokenizer with digest {digest}")
    if not 0 < len(reply.data) <= min(PART_BYTES, reply.total - offset):
        raise CheckpointError(f"it sent {len(reply.data)} bytes at {offset} of {reply.total}")
    return reply


async def _answer(channel: AsyncDealerChannel[EngineReply, EngineRequest], offset: int) -> TokenizerPart:
    """Raises `CheckpointError` as soon as the connection is lost: a killed worker stays registered for seconds."""

    async def awaited() -> TokenizerPart:
        while not isinstance(reply := await channel.receive(), TokenizerPart) or reply.offset != offset:
            continue
        return reply

    answer, lost = asyncio.create_task(awaited()), asyncio.create_task(channel.disconnected())
    try:
        await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise CheckpointError("the connection to it is lost")
    finally:
        for task in (answer, lost):
            task.cancel()
        await asyncio.gather(answer, lost, return_exceptions=True)


def _folder() -> Path:
    return private_folder("tokenizers")


def _cached(digest: str) -> FoundTokenizer | None:
    """The folder with these files, checked; None where there is none."""
    try:
        folder = _folder() / digest
        bundle = TokenizerBundle.read(folder)
        if bundle.digest != digest:
            return None
        folder.touch()
    except (CheckpointError, OSError):
        return None
    return FoundTokenizer(digest, bundle.encoding, folder)


def _keep(bundle: TokenizerBundle) -> FoundTokenizer:
    """Write `bundle` to a folder of its own, whole or not at all. Raises `OSError`."""
    root = _folder()
    target = root / bundle.digest
    partial = Path(tempfile.mkdtemp(prefix=".", dir=root))
    try:
        bundle.write(partial)
        if not _moved(partial, target) and _cached(bundle.digest) is None:
            # Other content: no model that is opened at the same time reads it.
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for former in _superfluous(root, kept=target):
        shutil.rmtree(former, ignore_errors=True)
    return FoundTokenizer(bundle.digest, bundle.encoding, target)


def _moved(partial: Path, target: Path) -> bool:
    """False where `target` has files already. Raises `OSError`."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _superfluous(root: Path, *, kept: Path) -> Iterator[Path]:
    """Folders beyond `MAX_CACHE_BYTES`, those that were not used for longest, and what killed processes have begun."""
    named = [each for each in root.iterdir() if each.is_dir() and each != kept]
    yield from (each for each in named if each.name.startswith(".") and time.time() - each.stat().st_mtime > PARTIAL_S)
    folders = [each for each in named if not each.name.startswith(".")]
    size = _bytes_in(kept)
    for folder in sorted(folders, key=lambda each: each.stat().st_mtime, reverse=True):
        size += _bytes_in(folder)
        if size > MAX_CACHE_BYTES:
            yield folder


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
