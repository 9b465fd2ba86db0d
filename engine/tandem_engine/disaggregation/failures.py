"""How a request ends when its transfer does."""

from tandem_engine.errors import TransferError
from tandem_engine.messages.outputs import Finish, FinishReason


def transfer_failed(reason: str) -> Finish:
    """The transfer failed, the request did not: the gateway sends it elsewhere and the stream goes on."""
    return Finish(
        reason=FinishReason.ERROR, error=f"KV transfer failed: {reason}", code=TransferError.code, retryable=True
    )
