"""Commands of a gateway to the workers of one model, over their health ports.

They need the order token (`common.tokens`): with a key file the one that all processes of the deployment derive from
it; without one, on loopback alone, the worker's own, which its file has.
"""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec

from tandem_engine.base.addresses import Address
from tandem_engine.ipc.keys import KeyPair
from tandem_services.common.tokens import order_token, token_of
from tandem_services.router.decision import WorkerView

MAX_REPLY_BYTES = 1 << 16
MAX_SHOWN = 300

_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Health ports have http alone. A default context reads all certificates of the system, 25 ms for each worker."""


class WorkerRejectedError(Exception):
    """The worker has carried out nothing, and would not if it were sent the same again. `code` is its own."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerSilentError(Exception):
    """No usable reply: whether the command was carried out is not known. `again`: it may be sent once more at once."""

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    message: str = ""
    code: str = ""
    digest: str = ""
    rank: int = 1
    root: str = ""
    size: int = 0
    former: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedThere:
    """What a worker has loaded."""

    digest: str
    rank: int
    root: str
    size: int
    former: str
    """Digest of what the name stood for before; "" for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCommands:
    """Of one model service."""

    keys: KeyPair | None
    """Those of the deployment."""

    async def load(
        self,
        worker: WorkerView,
        *,
        name: str,
        path: str,
        replaces: bool,
        digest: str,
        within_s: float,
        pinned: bool = False,
    ) -> LoadedThere:
        """`digest`: other content is refused; "" for any. `pinned`: it makes way for no other adapter.

        Raises `WorkerRejectedError` and `WorkerSilentError`.
        """
        body = {"lora_name": name, "lora_path": path, "load_inplace": replaces, "digest": digest}
        body |= {"pinned": True} if pinned else {}
        reply = await self._post(worker, "/load_lora_adapter", body, within_s=within_s)
        if not reply.digest:
            raise WorkerSilentError("its reply has no digest")
        return LoadedThere(digest=reply.digest, rank=reply.rank, root=reply.root, size=reply.size, former=reply.former)

    async def unload(self, worker: WorkerView, *, name: str, digest: str, cached: str, within_s: float) -> str:
        """The digest of what is unloaded. `digest`: refused for other content; "" for any. `cached`: content that a
        request has brought in, and that goes as well; "" for none. Raises as `load`."""
        body = {"lora_name": name, "digest": digest} | ({"cached": cached} if cached else {})
        return (await self._post(worker, "/unload_lora_adapter", body, within_s=within_s)).digest

    async def _post(self, worker: WorkerView, path: str, body: Mapping[str, Any], *, within_s: float) -> _Reply:
        if not worker.health_endpoint:
            raise WorkerRejectedError("it reports no health port: update it", code="config_error")
        headers = {"authorization": f"Bearer {token}"} if (token := self._token(worker)) else {}
        # Most gateways give no such command. To load it takes as long as a twelfth of all that one loads at its start.
        httpx: Any = await asyncio.to_thread(import_module, "httpx")
        try:
            async with (
                asyncio.timeout(within_s),
                httpx.AsyncClient(trust_env=False, timeout=within_s, verify=_NO_TLS) as client,
                client.stream("POST", worker.health_endpoint + path, json=dict(body), headers=headers) as response,
            ):
                data = bytearray()
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_REPLY_BYTES:
                        raise WorkerSilentError(f"its reply has more than {MAX_REPLY_BYTES} bytes")
        except TimeoutError as error:
            raise WorkerSilentError(f"no reply within {within_s:.0f} s", again=False) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WorkerSilentError(
                f"its health port does not answer ({type(error).__name__}): start workers on other machines with "
                "--health-host"
            ) from error
        return _reply_of(response.status_code, bytes(data))

    def _token(self, worker: WorkerView) -> str | None:
        if self.keys is not None:
            return order_token(self.keys)
        return token_of(Address.parse(worker.health_endpoint.removeprefix("http://").replace("%25", "%")))


def _reply_of(status: int, data: bytes) -> _Reply:
    try:
        reply = msgspec.json.decode(data, type=_Reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = data[:MAX_SHOWN].decode("utf-8", "replace")
        raise WorkerSilentError(f"it answers with {status}: {shown!r}") from error
    if status == 200:
        return reply
    message = reply.message[:MAX_SHOWN]
    if status >= 500:
        # The engine has had all its time already.
        raise WorkerSilentError(message, again=status != 504)
    raise WorkerRejectedError(message, code=reply.code)
