"""`POST /tokenize` and `POST /detokenize`, with vLLM's shapes."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem_services.common.errors import bad_request
from tandem_services.gateway.access.caller import Caller
from tandem_services.gateway.api.chat import continues_final, template_messages, template_variables
from tandem_services.gateway.api.openai_schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from tandem_services.gateway.api.response_writer import Answering
from tandem_services.gateway.http.body import BodyDecoder, decode_body, read_body
from tandem_services.gateway.http.middleware import identity_of
from tandem_services.gateway.http.sse import encode_json
from tandem_services.gateway.limits import check_token_ids
from tandem_services.gateway.models.catalog import ModelCatalog
from tandem_services.gateway.models.service import ModelService
from tandem_services.gateway.output.tools import tool_use


class Tokenization:
    """Both routes. A missing `model` means the one there is."""

    def __init__(self, models: ModelCatalog, answering: Answering, *, strict: bool) -> None:
        self._models = models
        self._shared = answering
        self._tokenize = BodyDecoder(TokenizeRequest, strict=strict)
        self._detokenize = BodyDecoder(DetokenizeRequest, strict=strict)

    async def tokenize(self, request: Request) -> Response:
        """Ids of a prompt, or of messages through the chat template, exactly as generation would see them."""
        body = await decode_body(self._tokenize.decode, await read_body(request))
        served = self._models.of_request(request.scope, body.model).service
        caller = identity_of(request.scope).caller
        answer = await self._shared.without_workers(request, lambda: _tokenized(body, served, caller))
        return Response(encode_json(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, control tokens included; U+FFFD for bytes that are not UTF-8."""
        body = await decode_body(self._detokenize.decode, await read_body(request))
        prompts = self._models.of_request(request.scope, body.model).service.prompts
        check_token_ids(body.tokens, prompts.tokenizer.vocab_size, "tokens")
        text = await self._shared.without_workers(
            request, lambda: prompts.decode(body.tokens, skip_special_tokens=False)
        )
        return Response(encode_json(DetokenizeResponse(prompt=text)), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """What `GET /tokenizer_info` answers; the query may name a `model`."""
        served = self._models.of_request(request.scope, request.query_params.get("model")).service
        tokenizer = served.prompts.tokenizer
        template = tokenizer.chat_template
        answer = TokenizerInfo(
            model_max_length=served.model.context_length,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            special_tokens={} if template is None else template.special_tokens,
            chat_template=None if template is None else template.text,
        )
        return Response(encode_json(answer), media_type="application/json")


async def _tokenized(body: TokenizeRequest, served: ModelService, caller: Caller) -> TokenizeResponse:
    ids = await _encode(body, served, caller)
    return TokenizeResponse(
        count=len(ids),
        max_model_len=served.model.context_length,
        tokens=list(ids),
        token_strs=await served.prompts.spellings(ids) if body.return_token_strs else None,
    )


async def _encode(body: TokenizeRequest, served: ModelService, caller: Caller) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await served.prompts.encode(
            body.prompt,
            add_special_tokens=body.add_special_tokens is not False,
            parse_special_tokens=served.prompts.parses_special_tokens(body.parse_special_tokens, caller),
        )
    messages = template_messages(body.messages, on_channels=served.model.dialect.channels is not None)
    final = continues_final(
        body.messages, asked=body.continue_final_message, add_generation_prompt=body.add_generation_prompt
    )
    return await served.prompts.encode_chat(
        messages,
        add_generation_prompt=not final and body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        continue_final=final,
        tools=_tools(body, served),
        variables=template_variables(
            served.prompts.tokenizer.chat_template,
            body.chat_template_kwargs,
            documents=body.documents,
            reasoning_effort=body.reasoning_effort,
        ),
    )


def _tools(body: TokenizeRequest, served: ModelService) -> list[dict[str, Any]] | None:
    dialect = served.model.dialect
    tools = tool_use(body.tools, None, parallel=None, family=dialect.family, template_knows_tools=dialect.knows_tools)
    return None if tools is None else tools.for_template
