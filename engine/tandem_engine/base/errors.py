"""Errors of the engine, each with a stable code that services map to HTTP statuses and exit codes."""

from typing import ClassVar


class EngineError(Exception):
    """Base of every error the engine raises on purpose. The message is fit for an operator to read."""

    code: ClassVar[str] = "engine_error"


class ConfigError(EngineError):
    """A flag or a combination of flags that cannot work. The message names the flag and the fix."""

    code = "config_error"


class CheckpointError(EngineError):
    """A checkpoint that is absent, broken or unsupported. The message names the file and the tensor or field."""

    code = "checkpoint_error"


class UnsupportedVariantError(CheckpointError):
    """A sound checkpoint with a field or value that Tandem's own layers do not implement; transformers may."""


class InvalidRequestError(EngineError):
    """A request that no engine state can ever serve. `param` names the field at fault."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SessionError(InvalidRequestError):
    """A turn that its conversation cannot take now: another one is computed, or turns are missing or doubled."""

    code = "session_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="session")


class SessionLostError(SessionError):
    """A conversation that is not kept (any more). The whole of it has to be sent again, as a new one."""

    code = "session_lost"


class AdapterMissingError(EngineError):
    """The adapter that a request names is not loaded here; another worker may have it."""

    code = "adapter_missing"


class QueueFullError(EngineError):
    """The waiting queue is at its bound; the client should try again later."""

    code = "queue_full"


class DrainingError(EngineError):
    """The engine takes no new requests because it is about to stop; another worker can serve them."""

    code = "draining"


class PausedError(EngineError):
    """The engine takes no new requests while an operator has paused it; another worker can serve them."""

    code = "paused"


class BusyError(EngineError):
    """An order that cannot be carried out now. The message says what is in the way and what would clear it."""

    code = "busy"


class RequestFailedError(EngineError):
    """A request that ended before its output did. `reason` is the engine's own code for it."""

    code = "request_failed"

    def __init__(self, message: str, *, reason: str, retryable: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


class EngineStoppedError(EngineError):
    """The engine was closed, or has stopped on an error; it takes no more requests."""

    code = "engine_stopped"


class OutOfPagesError(EngineError):
    """The allocator could not give what a caller was promised; the message says which phase asked."""

    code = "out_of_pages"


class GrammarCompilerError(EngineError):
    """Grammars cannot be compiled here right now, whatever they say; another worker may."""

    code = "grammar_compiler_error"


class TransferError(EngineError):
    """A KV transfer that failed or was refused. The request can be computed elsewhere."""

    code = "transfer_error"


class TransportUnavailableError(EngineError):
    """The KV transport cannot be loaded or started here. The message says what to install or set."""

    code = "transport_unavailable"


class RankLostError(EngineError):
    """A rank of a tensor-parallel engine ended, failed or stopped answering. The others cannot continue without it."""

    code = "rank_lost"


class OtherRankFailedError(EngineError):
    """A step raised on another rank, so this rank discards it too. The ranks continue."""

    code = "engine_error"


class ReleaseSkewError(EngineError):
    """The other process is of a release outside the window of this one. The message names both releases."""

    code = "release_skew"


class WireError(EngineError):
    """Bytes from another process that are not a message of ours: wrong version, shape or size."""

    code = "wire_error"
