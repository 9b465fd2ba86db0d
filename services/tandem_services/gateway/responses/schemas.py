"""Bodies of `POST /v1/responses`, as far as they are served: a stateless subset of OpenAI's.

What would change the answer and is not served is refused by name (`REFUSED`); other unknown fields are ignored.
"""

from typing import Any, Literal

import msgspec

from tandem_services.gateway.openai_schemas import ChatTemplateVariables, ReasoningEffort


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message, a call of the model's, its output, or reasoning, by `type`."""

    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """Chat's, without its inner object."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    """For chat templates that have a place for it."""
    max_tokens: int | None = None
    """OpenRouter's: a chat's `thinking_token_budget`."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    stream_options: Any = None
    """What is in a stream is not for the client to choose: there is nothing to obfuscate or to leave out."""
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    chat_template_kwargs: ChatTemplateVariables | None = None
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    truncation: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    context_management: Any = None
    reasoning: ReasoningOptions | None = None


REFUSED = {
    "store": "responses are not kept: leave it out or set it to false, and send the whole conversation as input",
    "previous_response_id": "responses are not kept: send the whole conversation as input",
    "conversation": "conversations are not kept here: send the whole conversation as input",
    "background": "a response is answered on its own connection",
    "prompt": "there are no stored prompts",
    "truncation": "an input that is too long is refused, never cut",
    "top_logprobs": "logprobs are served by /v1/chat/completions",
    "max_tool_calls": "tools are run by the client, which can count them",
    "moderation": "nothing is moderated here",
    "context_management": "a conversation is answered as it is sent",
}
"""Why, by field."""
NEUTRAL = {"store": (False,), "background": (False,), "truncation": ("disabled",), "top_logprobs": (0,)}
"""Values that ask for nothing."""
INCLUDABLE = ("reasoning.encrypted_content",)
"""What needs nothing done: reasoning is answered in plain text, and taken back so."""
