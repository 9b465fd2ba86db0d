"""Small tokenizers written to disk as checkpoints have them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "write <tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tools as Hermes has them."""
THINKING_CHATML = TOOL_CHATML.replace("assistant\n", "assistant\n{% if enable_thinking %}<think>\n{% endif %}") + (
    "{# reasoning ends with </think> #}"
)
"""As above; and `enable_thinking` opens the reasoning in the prompt."""
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
"""Id of `<|im_end|>`."""


@cache
def tokenizer_document() -> str:
    """A byte-level BPE of about 400 tokens that knows ChatML's literals and `<think>`, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and hello world"] * 8, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer.to_str()


def write_tokenizer(
    folder: Path, *, chat_template: str | None = CHATML, specials: Sequence[str] = (), **files: Any
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and further JSON files (`generation_config={...}`).

    `specials`: further special tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = tokenizer_document()
    if specials:
        tokenizer = Tokenizer.from_str(document)
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
        document = tokenizer.to_str()
    (folder / "tokenizer.json").write_text(document, "utf-8")
    config = {"eos_token": "<|im_end|>", "chat_template": chat_template}
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder
