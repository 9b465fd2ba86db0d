"""`POST /v1/embeddings`: one vector for each input.

    body ─▶ plan ─▶ one choice per input, a bounded number at a time ─▶ one response, in the order of the inputs

An input is a prompt of which the hidden states are returned instead of a continuation. It is routed, retried and
aborted as any prompt, under the same deadline. One worker computes it alone, a prefill worker where there is one.
"""

import asyncio
import base64
from array import array
from collections.abc import Sequence
from sys import byteorder
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from tandem_engine.base.checked_dataclass import checked_dataclass
from tandem_engine.base.logs import quoted
from tandem_engine.messages.requests import Pooling, PoolingParams
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.text_tokenizer import TruncationSide
from tandem_services.common.errors import bad_request, internal_error
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.openai_schemas import Prompt, PromptItem, place_of, split_prompts
from tandem_services.gateway.api.request_fields import requested_truncation
from tandem_services.gateway.api.response_writer import Answering, new_record
from tandem_services.gateway.dispatch.choice_run import AcceptedRequest, ChoiceRun
from tandem_services.gateway.dispatch.dispatcher import Dispatcher
from tandem_services.gateway.dispatch.plan import Choice, RequestPlan
from tandem_services.gateway.http.body import BodyDecoder, body_of, decode_body
from tandem_services.gateway.http.interruption import Limit, client_of
from tandem_services.gateway.http.middleware import RequestIdentity, identify_request, identity_of
from tandem_services.gateway.http.sse import encode_json, send_json
from tandem_services.gateway.limits import (
    MAX_DIMENSIONS,
    MAX_EMBEDDING_INPUTS,
    check_cache_salt,
    check_context,
    check_name,
    check_priority,
    check_token_ids,
)
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.models.service import ModelService
from tandem_services.gateway.output.token_sequence import Accepted


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


CONCURRENT_INPUTS = 32
"""Inputs of one request that workers have at once: a large request must not fill their queues alone."""

NO_TEXT = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@checked_dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingPlan(RequestPlan):
    """One choice for each input."""

    as_base64: bool


class EmbeddingPlanner:
    """Validates embedding requests."""

    def __init__(self, *, strict: bool) -> None:
        self._decoder = BodyDecoder(EmbeddingRequest, strict=strict, closed=True)

    def decode(self, body: bytes) -> EmbeddingRequest:
        """Raises `ApiError` naming the field at fault."""
        return self._decoder.decode(body)

    async def plan(self, request: EmbeddingRequest, served: ModelService, caller: Caller) -> EmbeddingPlan:
        """Raises `ApiError` naming the field at fault."""
        check_name(request.user, "user")
        check_cache_salt(request.cache_salt)
        check_priority(request.priority or 0)
        if request.dimensions is not None and not 1 <= request.dimensions <= MAX_DIMENSIONS:
            raise bad_request(
                f"dimensions must be between 1 and {MAX_DIMENSIONS}, got {quoted(request.dimensions)}", "dimensions"
            )
        prompts = split_prompts(request.input, param="input", most=MAX_EMBEDDING_INPUTS)
        inputs = await _encode(request, served, prompts, caller)
        return EmbeddingPlan(
            model=request.model or "",
            choices=tuple(Choice(index=n, input_ids=ids, sampling=NO_TEXT) for n, ids in enumerate(inputs)),
            pooling=PoolingParams(
                pooling=request.pooling or Pooling.LAST,
                normalize=request.normalize is not False,
                dimensions=request.dimensions,
            ),
            as_base64=request.encoding_format == "base64",
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
        )


async def _encode(
    request: EmbeddingRequest, served: ModelService, prompts: Sequence[Prompt], caller: Caller
) -> list[tuple[int, ...]]:
    encoder = served.prompts
    # vLLM's side for models that it serves embeddings of: the topic of a text is at its beginning.
    truncation = requested_truncation(request, encoder.context_length, side="right")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special = request.add_special_tokens is not False
    parsed = encoder.parses_special_tokens(request.parse_special_tokens, caller)
    encoded = iter(
        await encoder.encode_all(
            texts,
            add_special_tokens=special,
            parse_special_tokens=parsed,
            param="input",
            truncation=truncation,
        )
        if texts
        else ()
    )
    inputs = []
    for position, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = next(encoded)
        else:
            place = place_of(request.input, position, "input")
            check_token_ids(prompt, encoder.tokenizer.vocab_size, "input", place=place)
            ids = tuple(prompt) if truncation is None else truncation.of(prompt)
        check_context(len(ids), 0, encoder.context_length(), "input")
        inputs.append(ids)
    return inputs


class EmbeddingEndpoint:
    """ASGI application of the route."""

    path = "/v1/embeddings"

    def __init__(self, models: ModelCatalog, shared: Answering, *, strict: bool) -> None:
        self._planner = EmbeddingPlanner(strict=strict)
        self._models = models
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(scope, receive)
        with client_of(scope):
            request = await decode_body(self._planner.decode, body)
            del body  # as in `GenerationEndpoint`
            await self._serve(request, scope, send)

    async def _serve(self, request: EmbeddingRequest, scope: Scope, send: Send) -> None:
        identify_request(scope, request.request_id or request.rid)
        named = self._models.of_request(scope, request.model)
        served = named.service
        request.model = request.model or served.model.name
        identity = identity_of(scope)
        caller = identity.caller
        deadline = self._shared.deadline(identity, request.timeout)
        limit = self._shared.limit(deadline)
        try:
            with limit:
                plan = (await self._planner.plan(request, served, caller)).owned_by(caller)
                identity.body.release()
                plan = plan.computed_by(await named.resolved(caller.tenant))
            await self._answer(plan, served, identity, limit, deadline, send)
        finally:
            limit.stop()

    async def _answer(
        self,
        plan: EmbeddingPlan,
        served: ModelService,
        identity: RequestIdentity,
        limit: Limit,
        deadline: float,
        send: Send,
    ) -> None:
        record = new_record(
            identity,
            endpoint=self.path,
            requested_model=plan.model,
            prompt_tokens=plan.prompt_tokens,
            choices=len(plan.choices),
            adapter=plan.adapter,
        )

        request = AcceptedRequest(
            plan=plan,
            record=record,
            arrived=identity.arrived,
            deadline=deadline,
            caller=identity.caller,
            trace=identity.trace,
        )

        async def answer() -> None:
            vectors = await self._vectors(request, served.dispatcher, limit)
            await send_json(send, 200, _response(plan, vectors))

        await self._shared.accepted(record, identity, served, answer, tokens=plan.prompt_tokens)

    async def _vectors(
        self, request: AcceptedRequest[EmbeddingPlan], dispatcher: Dispatcher, limit: Limit
    ) -> list[bytes]:
        """One per input, in their order. The first failure ends all of them."""
        seats = asyncio.Semaphore(CONCURRENT_INPUTS)

        async def vector(choice: Choice) -> bytes:
            async with seats:
                return await _vector(request, choice, dispatcher)

        tasks = [asyncio.create_task(vector(choice)) for choice in request.plan.choices]
        try:
            with limit:
                return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _vector(request: AcceptedRequest[EmbeddingPlan], choice: Choice, dispatcher: Dispatcher) -> bytes:
    run = ChoiceRun(request=request, choice=choice, record=request.record.choices[choice.index])
    found: list[bytes] = []

    async def take(accepted: Accepted) -> bool:
        if accepted.embedding is not None:
            found.append(accepted.embedding)
        return bool(found)

    await dispatcher.run(run, take)
    if not found:
        raise internal_error("The model worker ended without an embedding. Try again.")
    run.record.finish_reason = "stop"
    return found[0]


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
