"""`suffix` of completions: the answer goes between the prompt and it (fill in the middle)."""

import msgspec

from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.errors import bad_request
from tandem_services.gateway.openai_schemas import CompletionRequest

FIELD = "suffix"


def check_suffix(request: CompletionRequest) -> None:
    """Raises `ApiError` 400 naming what it does not go together with."""
    if not request.suffix:
        return
    others = {
        "echo": request.echo,
        "session_params": request.session_params is not None,
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
    }
    for name, given in others.items():
        if given:
            raise bad_request(f"{name} is not available with {FIELD}", name)
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise bad_request(f"{FIELD} needs a prompt that is text: with token ids, send the model's own marks", FIELD)


def middle_sampling(request: CompletionRequest, sampling: SamplingParams, tokenizer: TextTokenizer) -> SamplingParams:
    """Some models end a middle with a token of its own."""
    marks = tokenizer.fim
    if not request.suffix or marks is None or marks.end is None or marks.end in sampling.stop_token_ids:
        return sampling
    return msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, marks.end))
