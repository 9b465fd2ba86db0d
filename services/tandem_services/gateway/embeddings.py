"""`POST /v1/embeddings`: a vector for each input.

    body ─▶ plan ─▶ one choice per input, a bounded number at a time ─▶ one answer, in the order of the inputs

An input is a prompt whose hidden states are wanted instead of its continuation. It takes the ways of a prompt:
chosen worker, retries, deadline, abort when the client leaves. One worker computes it alone, a prefill worker
where there is one.
"""

import asyncio
import base64
from array import array
from contextlib import aclosing
from dataclasses import dataclass
from sys import byteorder

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tandem_engine.messages.pooling import Pooling, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_services.common.errors import bad_request, internal_error
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.answer_format import encode_json
from tandem_services.gateway.answering import Answering, new_record, time_limit
from tandem_services.gateway.boundary import RequestIdentity, identity_of
from tandem_services.gateway.disconnect import run_until_disconnect
from tandem_services.gateway.dispatch import ChoiceRequest
from tandem_services.gateway.embedding_schemas import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from tandem_services.gateway.explain import ChoiceRecord, RequestRecord
from tandem_services.gateway.limits import (
    MAX_EMBEDDING_INPUTS,
    check_cache_salt,
    check_context,
    check_priority,
    check_token_ids,
    check_user,
)
from tandem_services.gateway.prompt_shapes import Prompt, place_of, split_prompts
from tandem_services.gateway.prompts import PromptEncoder
from tandem_services.gateway.request_body import BodyDecoder, read_body
from tandem_services.gateway.sse import send_json

CONCURRENT_INPUTS = 32
"""Inputs of one request that workers have at once: a large request must not fill their queues alone."""

NO_TEXT = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingPlan:
    """A validated request in token ids. Nothing has been sent yet."""

    model: str
    inputs: tuple[tuple[int, ...], ...]
    pooling: PoolingParams
    as_base64: bool
    cache_salt: str
    priority: int
    timeout_s: float | None
    """The longest that the client wants to wait."""

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.inputs))


class EmbeddingPlanner:
    """Validates embedding requests."""

    def __init__(self, prompts: PromptEncoder, *, strict: bool) -> None:
        self._prompts = prompts
        self._decoder = BodyDecoder(EmbeddingRequest, strict=strict)

    async def plan(self, body: bytes, caller: Caller) -> EmbeddingPlan:
        """Raises `ApiError` naming the field at fault."""
        request = self._decoder.decode(body)
        self._prompts.model.check_name(request.model, caller)
        check_user(request.user)
        check_cache_salt(request.cache_salt)
        check_priority(request.priority or 0)
        if request.dimensions is not None and request.dimensions < 1:
            raise bad_request(f"dimensions must be at least 1, got {request.dimensions}", "dimensions")
        prompts = split_prompts(request.input, param="input", most=MAX_EMBEDDING_INPUTS)
        return EmbeddingPlan(
            model=self._prompts.model.name,
            inputs=tuple([await self._encode(request, prompt, position) for position, prompt in enumerate(prompts)]),
            pooling=PoolingParams(
                pooling=request.pooling or Pooling.LAST,
                normalize=request.normalize is not False,
                dimensions=request.dimensions,
            ),
            as_base64=request.encoding_format == "base64",
            cache_salt=caller.cache_salt(request.cache_salt or ""),
            priority=caller.priority(request.priority or 0),
            timeout_s=request.timeout,
        )

    async def _encode(self, request: EmbeddingRequest, prompt: Prompt, position: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            add_special_tokens = request.add_special_tokens is not False
            ids = await self._prompts.encode(prompt, add_special_tokens=add_special_tokens, param="input")
        else:
            place = place_of(request.input, position, "input")
            check_token_ids(prompt, self._prompts.tokenizer.vocab_size, "input", place=place)
            ids = tuple(prompt)
        check_context(len(ids), 0, self._prompts.context_length(), "input")
        return ids


class EmbeddingEndpoint:
    """ASGI application of the route."""

    path = "/v1/embeddings"

    def __init__(self, prompts: PromptEncoder, shared: Answering, *, strict: bool) -> None:
        self._planner = EmbeddingPlanner(prompts, strict=strict)
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(Request(scope, receive))
        await run_until_disconnect(self._serve(body, identity_of(scope), send), receive)

    async def _serve(self, body: bytes, identity: RequestIdentity, send: Send) -> None:
        caller = identity.caller
        plan = await self._planner.plan(body, caller)
        record = new_record(
            identity,
            endpoint=self.path,
            model=plan.model,
            prompt_tokens=plan.prompt_tokens,
            choices=len(plan.inputs),
        )
        tokens, timeout_s = plan.prompt_tokens, plan.timeout_s
        async with self._shared.accepted(record, identity, tokens=tokens, timeout_s=timeout_s) as deadline:
            vectors = await self._vectors(plan, record, deadline, caller)
            await send_json(send, 200, _response(plan, vectors))

    async def _vectors(
        self, plan: EmbeddingPlan, record: RequestRecord, deadline: float, caller: Caller
    ) -> list[bytes]:
        """One per input, in their order. The first failure ends all of them."""
        seats = asyncio.Semaphore(CONCURRENT_INPUTS)

        async def vector(index: int) -> bytes:
            async with seats:
                return await self._vector(_choice(plan, record, index, deadline, caller), record.choices[index])

        tasks = [asyncio.create_task(vector(index)) for index in range(len(plan.inputs))]
        try:
            async with time_limit(max(deadline - self._shared.clock.now(), 0.0)):
                return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _vector(self, request: ChoiceRequest, record: ChoiceRecord) -> bytes:
        async with aclosing(self._shared.generator.dispatcher.run(request, record)) as outputs:
            async for accepted in outputs:
                if accepted.embedding is not None:
                    record.finish_reason = "stop"
                    return accepted.embedding
        raise internal_error("The model worker ended without an embedding. Try again.")


def _choice(plan: EmbeddingPlan, record: RequestRecord, index: int, deadline: float, caller: Caller) -> ChoiceRequest:
    return ChoiceRequest(
        request_id=record.request_id,
        index=index,
        model=plan.model,
        input_ids=plan.inputs[index],
        sampling=NO_TEXT,
        pooling=plan.pooling,
        cache_salt=plan.cache_salt,
        priority=plan.priority,
        deadline=deadline,
        caller=caller,
    )


def _response(plan: EmbeddingPlan, vectors: list[bytes]) -> bytes:
    encode = _as_base64 if plan.as_base64 else _as_floats
    return encode_json(
        EmbeddingResponse(
            data=[Embedding(index=index, embedding=encode(vector)) for index, vector in enumerate(vectors)],
            model=plan.model,
            usage=EmbeddingUsage(prompt_tokens=plan.prompt_tokens, total_tokens=plan.prompt_tokens),
        )
    )


def _as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode("ascii")


def _as_floats(vector: bytes) -> list[float]:
    values = array("f")
    values.frombytes(vector)
    if byteorder == "big":
        values.byteswap()
    return values.tolist()
