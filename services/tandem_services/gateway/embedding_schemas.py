"""OpenAI's bodies of `POST /v1/embeddings`, with vLLM's additions. Decoded as `openai_schemas` says."""

from typing import Any, Literal

import msgspec

from tandem_engine.messages.pooling import Pooling
from tandem_engine.tokenizer.truncation import TruncationSide
from tandem_services.gateway.prompt_shapes import PromptItem


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[PromptItem] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Pooling | None = None
    """Ours: last (default), mean or cls."""
    normalize: bool | None = None
    """vLLM's: scale to length 1, which is the default."""
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    """Seconds."""
    request_id: str | None = None
    rid: str | None = None
    """SGLang's name for `request_id`."""
    custom_labels: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    embedding: list[float] | str
    """Base64 of little-endian float32 when that was asked for."""
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
