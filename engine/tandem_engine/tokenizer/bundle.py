"""TokenizerBundle: the files of a checkpoint that `TextTokenizer` and a gateway read, as bytes with one digest.

    worker    read(folder)            once, at its start; sends the data in parts, reports the digest
    gateway   verified(data, digest)  what a worker or a store has sent; then write(folder), which `TextTokenizer` loads

The names are a closed list and the size is bounded, so received data can neither choose where a file is written nor how
much is. The content is a checkpoint's, and is treated as such: `TextTokenizer` checks it and runs chat templates in its
sandbox.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from tandem_engine.base.errors import CheckpointError
from tandem_engine.messages.outputs import TokenizerPart
from tandem_engine.messages.requests import TokenizerRequest

MAX_BUNDLE_BYTES = 64 << 20
PART_BYTES = 1 << 20
"""Of the data in one message: sent between two steps of an engine."""

DIGEST_BYTES = 16

FileName = Literal[
    "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
]
REQUIRED: tuple[FileName, ...] = ("config.json", "tokenizer.json")
OPTIONAL: tuple[FileName, ...] = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")

_FILES = msgspec.msgpack.Decoder(dict[FileName, bytes])


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """Equal for equal files."""

    data: bytes = field(repr=False)
    """msgpack: contents by name."""
    digest: str
    """Of `data`, in hexadecimal."""

    @staticmethod
    def read(folder: Path, *, located: Callable[[str], Path] | None = None) -> "TokenizerBundle":
        """Of a checkpoint. `located`: path of a file; raises `CheckpointError` for one that may not be read.

        Raises `CheckpointError` for a missing file, and for more than `MAX_BUNDLE_BYTES`.
        """
        files: dict[str, bytes] = {}
        room = MAX_BUNDLE_BYTES
        for name in sorted((*REQUIRED, *OPTIONAL)):
            path = folder / name
            if name in OPTIONAL and not path.exists():
                continue
            files[name] = _content(path if located is None else located(name), room)
            room -= len(files[name])
        data = msgspec.msgpack.encode(files)
        return TokenizerBundle(data, digest_of(data))

    @staticmethod
    def verified(data: bytes, digest: str) -> "TokenizerBundle":
        """Received data. `digest`: from an authenticated source. Raises `CheckpointError` for any other data."""
        if len(data) > MAX_BUNDLE_BYTES + PART_BYTES:
            raise CheckpointError(f"a tokenizer of {len(data)} bytes was received, at most {MAX_BUNDLE_BYTES} are read")
        if digest_of(data) != digest:
            raise CheckpointError(f"the received tokenizer is not the one with digest {digest}")
        bundle = TokenizerBundle(data, digest)
        missing = [name for name in REQUIRED if name not in bundle.files()]
        if missing:
            raise CheckpointError(f"the received tokenizer has no {missing[0]}")
        return bundle

    @property
    def encoding(self) -> str:
        """Digest of `tokenizer.json`, which decides what ids mean: the same for models that differ in weights, settings
        or chat template alone. Raises as `files`."""
        return digest_of(self.files()["tokenizer.json"])

    def files(self) -> dict[FileName, bytes]:
        """Contents by name. Raises `CheckpointError` for another name, and for data that are no bundle."""
        try:
            return _FILES.decode(self.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the received tokenizer cannot be read: {error}") from error

    def write(self, folder: Path) -> None:
        """The files, in an empty folder. Raises `OSError`, and as `files`."""
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


def tokenizer_part(bundle: TokenizerBundle | None, message: TokenizerRequest) -> TokenizerPart:
    """The answer to `message` of an engine with `bundle`."""
    data = b"" if bundle is None or bundle.digest != message.digest else bundle.data
    start = message.offset if 0 <= message.offset < len(data) else len(data)
    part = data[start : start + PART_BYTES]
    return TokenizerPart(digest=message.digest, offset=message.offset, total=len(data), data=part)


def digest_of(data: bytes) -> str:
    """Of a bundle's data, or of one file: in hexadecimal."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _content(path: Path, room: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(room + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > room:
        raise CheckpointError(f"{path}: the files of the tokenizer have more than {MAX_BUNDLE_BYTES} bytes together")
    return content
