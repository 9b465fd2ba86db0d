"""A prompt whose embedding is wanted, on its way through the engine."""

from dataclasses import dataclass

import numpy as np

from tandem_engine.errors import RequestFailedError
from tandem_engine.library.failure import error_of
from tandem_engine.library.outputs import EmbeddingOutput, EmbeddingRequestOutput
from tandem_engine.library.prompts import Encoded
from tandem_engine.messages.outputs import Finish, FinishReason, TokenOutput
from tandem_engine.messages.pooling import PoolingParams
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

NO_TEXT = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""The one token tells the engine that the prompt is computed; nobody sees it."""


@dataclass(kw_only=True, slots=True)
class EmbeddingAnswer:
    """Belongs to one thread."""

    request_id: str
    prompt: Encoded
    requests: tuple[GenerateRequest, ...]
    """One."""
    finish: Finish | None = None
    embedding: bytes | None = None

    @property
    def finished(self) -> bool:
        return self.finish is not None

    @property
    def failure(self) -> Finish | None:
        """The finish, when it is an error."""
        return self.finish if self.finish is not None and self.finish.reason is FinishReason.ERROR else None

    def take(self, output: TokenOutput) -> None:
        """What one step brought."""
        self.embedding = output.embedding or self.embedding
        self.finish = output.finish or self.finish

    def output(self) -> EmbeddingRequestOutput:
        """Once it has finished. Raises the error that it ended with."""
        assert self.finish is not None, f"request {self.request_id} is still computed"
        if self.failure is not None:
            raise error_of(self.failure)
        if self.embedding is None:
            raise RequestFailedError("the embedding was aborted", reason=self.finish.reason.value, retryable=True)
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=EmbeddingOutput(embedding=np.frombuffer(self.embedding, dtype="<f4").tolist()),
            finished=True,
        )


def make_embedding_answer(request_id: str, prompt: Encoded, params: PoolingParams) -> EmbeddingAnswer:
    """Ready to be asked."""
    request = GenerateRequest(
        rid=request_id,
        input_ids=prompt.token_ids,
        sampling=NO_TEXT,
        pooling=params,
        cache_salt=prompt.cache_salt,
    )
    return EmbeddingAnswer(request_id=request_id, prompt=prompt, requests=(request,))
