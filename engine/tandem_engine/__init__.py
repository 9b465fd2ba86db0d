"""Tandem's engine. As a library: `from tandem_engine import LLM, SamplingParams`.

Importing this package imports nothing else: gateways and routers use its messages in processes without torch. The names
below are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem_engine.library.adapters import LoRARequest
    from tandem_engine.library.async_llm import AsyncLLM
    from tandem_engine.library.llm import LLM
    from tandem_engine.library.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
    from tandem_engine.library.prompts import Session
    from tandem_engine.library.sampling_params import SamplingParams
    from tandem_engine.messages.requests import PoolingParams


__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "Session",
]

_HOMES = {
    "LLM": "library.llm",
    "AsyncLLM": "library.async_llm",
    "CompletionOutput": "library.outputs",
    "EmbeddingRequestOutput": "library.outputs",
    "LoRARequest": "library.adapters",
    "PoolingParams": "messages.requests",
    "RequestOutput": "library.outputs",
    "SamplingParams": "library.sampling_params",
    "Session": "library.prompts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
