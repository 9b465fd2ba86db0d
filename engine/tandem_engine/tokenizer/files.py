"""The tokenizer's files in a checkpoint folder. Every problem is a `CheckpointError` naming the file."""

import json
from pathlib import Path
from typing import Any

from tandem_engine.errors import CheckpointError

MAX_FILE_BYTES = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` when the file is absent, too large, or holds anything else."""
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(document).__name__}")
    return document


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, but an absent file is an empty object."""
    return read_json(path) if path.exists() else {}


def read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_FILE_BYTES} are read")
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"no {path.name} in {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text") from error


def special_token_text(value: Any) -> str | None:
    """`tokenizer_config.json` spells a special token as a string or as an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def named_special_tokens(tokenizer_config: dict[str, Any]) -> frozenset[str]:
    """Texts that `tokenizer_config.json` makes special, or control tokens of chats; `tokenizer.json` has others."""
    named = [value for name, value in tokenizer_config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens", "chat_control_tokens"):
        more = tokenizer_config.get(name) or ()
        named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
    decoder = tokenizer_config.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else ()
    named += [entry for entry in entries if isinstance(entry, dict) and entry.get("special")]
    return frozenset(text for text in map(special_token_text, named) if text)


def chat_template_text(folder: Path, tokenizer_config: dict[str, Any]) -> tuple[str, Path] | None:
    """The template and its file: `chat_template.jinja`, else `tokenizer_config.json` (its `default` of several)."""
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.exists():
        return read_text(jinja_file), jinja_file
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return (template, folder / "tokenizer_config.json") if isinstance(template, str) else None


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an output: the first of generation_config.json and config.json that names any."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(folder / name).get("eos_token_id")
        if value is not None:
            return _id_tuple(value, folder / name)
    return ()


def _id_tuple(value: Any, path: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r:.100}")
    return tuple(ids)
