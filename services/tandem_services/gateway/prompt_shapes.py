"""The shapes in which OpenAI's API takes prompts: a text, token ids, or a list of either."""

from collections.abc import Sequence
from typing import cast

from tandem_services.common.errors import bad_request

PromptItem = str | int | list[int]
Prompt = str | list[int]


def split_prompts(prompt: str | list[PromptItem] | None, *, param: str, most: int) -> Sequence[Prompt]:
    """The four shapes of field `param` as a list of texts or id lists.

    Raises:
        ApiError: 400 for an empty or mixed one, and for more than `most` prompts.
    """
    if prompt is None or len(prompt) == 0:
        raise bad_request(f"{param} must not be empty", param)
    if isinstance(prompt, str):
        return [prompt]
    # On the event loop, for millions of ids: no step of Python for each.
    if set(map(type, prompt)) == {int}:
        return [cast("list[int]", prompt)]
    if len(prompt) > most:
        raise bad_request(f"{param} takes at most {most} prompts, got {len(prompt)}", param)
    return [_one_prompt(item, position, param) for position, item in enumerate(prompt)]


def _one_prompt(item: PromptItem, position: int, param: str) -> Prompt:
    if isinstance(item, int):
        raise bad_request(f"{param}[{position}]: token ids and texts cannot be mixed", param)
    if not item:
        raise bad_request(f"{param}[{position}] must not be empty", param)
    return item


def place_of(prompt: str | list[PromptItem] | None, position: int, param: str) -> str:
    """Where the prompt that `split_prompts` has at `position` is in the request: field `param`, or an item of it."""
    alone = not isinstance(prompt, list) or isinstance(prompt[position], int)
    return param if alone else f"{param}[{position}]"
