"""NIXL behind a typed door. The only module that imports `nixl`.

Life of an agent
    1. start      named after the incarnation, so a restarted worker is a stranger to its peers; the
                  whole pool is registered once
    2. add_peer   once per peer incarnation (nixl #2109), from the metadata in its `Hello`
    3. write      a WRITE; `progress` until it is done, which is when it has arrived
    4. remove_peer, close
    5. cut off     once a network interface is gone or another one, nothing enters UCX any more (`interfaces`): writes
                   fail, those of peers stand still, and NIXL is left as it is until the process ends

NIXL's progress thread spins on a core of its own, so it is off. Progress is made inside `progress` and `attend`. A
fabric that copies memory or has RDMA needs nothing of the receiving side; over TCP it must call `attend` now and then,
or the write does not end.

Not thread-safe: one thread calls everything after the constructor. NIXL releases the GIL while it moves
bytes, so a large write stalls that thread alone.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem_engine import environment
from tandem_engine.disaggregation.nixl.interfaces import Interfaces
from tandem_engine.disaggregation.nixl.layout import Descriptors, Region
from tandem_engine.errors import TransferError, TransportUnavailableError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Write:
    """A WRITE in progress. Give it back with `NixlAgent.release` when it is done or given up."""

    handle: Any


class NixlAgent:
    """One nixl_agent with the UCX backend."""

    def __init__(
        self, name: str, region: Region, interfaces: Interfaces, *, network: Mapping[str, str] | None = None
    ) -> None:
        """`network`: variables of UCX (`interfaces.ucx_network`); those that the user has set count instead.

        Raises `TransportUnavailableError` when NIXL is not installed or cannot start here.
        """
        # Both libraries log every start and every lost peer on the terminal; what matters is logged here.
        environment.set_default("UCX_LOG_LEVEL", "fatal")
        environment.set_default("NIXL_LOG_LEVEL", "FATAL")
        try:
            import nixl._api as api
            import nixl._bindings as bindings
        except ImportError as error:
            raise TransportUnavailableError(
                f"NIXL cannot be loaded ({error}); `pip install nixl`, or serve with --transport none"
            ) from error
        self._errors = _error_types(bindings)
        self._region = region
        self._interfaces = interfaces
        try:
            with environment.defaults_while(network or {}):
                config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
                self._agent = api.nixl_agent(name, config)
            self._registered = self._agent.register_memory(
                [(region.address, region.num_pages * region.page_bytes, region.device_id, "")], region.device
            )
            self.metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise TransportUnavailableError(
                f"NIXL cannot start with the UCX backend on {region.device}: {error}; "
                "check UCX_TLS, or serve with --transport none"
            ) from error

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Learn a peer and connect to it. Raises `TransferError` when its metadata is not its own or unusable."""
        self._enter()
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransferError(f"metadata of {name} refused: {error}") from error
        if loaded not in (name, name.encode()):
            # By the name that NIXL has given, which may be no text: others wrote it.
            self._remove(loaded)
            raise TransferError(f"metadata of {name} belongs to agent {loaded!r}")

    def remove_peer(self, name: str) -> None:
        """Drop a peer and its mappings. Unknown names are ignored."""
        if self._interfaces.same():
            self._remove(name)

    def _remove(self, name: str | bytes) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            logger.debug("cannot remove peer %r: %s", name, error)

    def write(self, peer: str, descriptors: Descriptors, device: str) -> Write:
        """Start a WRITE into a peer's pool on `device`. Raises `TransferError` when the peer is lost.

        Where the fabric is a memory copy (same host), most of the copying happens inside this call.
        """
        self._enter()
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(descriptors.source, self._region.device),
                self._agent.get_xfer_descs(descriptors.target, device),
                peer,
            )
            state = self._agent.transfer(handle)
        except Exception as error:
            if handle is not None:
                self.release(Write(handle))
            if not isinstance(error, self._errors):
                raise
            raise TransferError(f"WRITE to {peer} failed: {error}") from error
        if state == "ERR":
            self.release(Write(handle))
            raise TransferError(f"WRITE to {peer} failed")
        return Write(handle)

    def progress(self, write: Write) -> bool:
        """Whether the write is done. Raises `TransferError` when it never will be; release it then, too."""
        self._enter()
        try:
            state = self._agent.check_xfer_state(write.handle)
        except self._errors as error:
            raise TransferError(f"WRITE failed: {error}") from error
        if state == "ERR":
            raise TransferError("WRITE failed")
        return bool(state == "DONE")

    def release(self, write: Write) -> None:
        """Give the handle back, cancelling the write if it is still in progress."""
        if not self._interfaces.same():
            return
        try:
            self._agent.release_xfer_handle(write.handle)
        except self._errors as error:
            # The binding keeps the handle and tries again when the agent goes.
            logger.warning("cannot release a cancelled WRITE: %s", error)

    def attend(self) -> None:
        """Let writes and connections of peers progress. No writer notifies; what comes all the same is dropped."""
        if not self._interfaces.same():
            return
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            logger.warning("cannot serve peers: %s", error)

    def close(self) -> None:
        """Deregister the pool. The agent's sockets go with it."""
        if not self._interfaces.same():
            return
        try:
            self._agent.deregister_memory(self._registered)
        except self._errors as error:
            logger.warning("cannot deregister KV memory: %s", error)
        finally:
            del self._agent

    def _enter(self) -> None:
        """Raises `TransferError` once nothing may enter UCX any more."""
        if not self._interfaces.same():
            raise TransferError(self._interfaces.lost)


def _error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions. They share no base class of their own."""
    return (
        bindings.nixlBackendError,
        bindings.nixlCancelledError,
        bindings.nixlInvalidParamError,
        bindings.nixlMismatchError,
        bindings.nixlNotAllowedError,
        bindings.nixlNotFoundError,
        bindings.nixlNotPostedError,
        bindings.nixlNotSupportedError,
        bindings.nixlRemoteDisconnectError,
        bindings.nixlRepostActiveError,
        bindings.nixlUnknownError,
        # Of the Python half, when no plug-in is found.
        RuntimeError,
    )
