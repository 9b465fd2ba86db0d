"""The tokenizer's files as bytes with a digest: read, sent in parts, verified, written."""

import msgspec
import pytest

from tandem_engine.base.errors import CheckpointError
from tandem_engine.messages.requests import TokenizerRequest
from tandem_engine.tokenizer import bundle as bundles
from tandem_engine.tokenizer.bundle import TokenizerBundle, digest_of, tokenizer_part
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.tokenizer_builders import write_tokenizer


@pytest.fixture
def folder(tmp_path):
    folder = write_tokenizer(tmp_path)
    (folder / "config.json").write_text('{"max_position_embeddings": 77}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_written_bundle_encodes_as_the_checkpoint(folder, tmp_path):
    bundle = TokenizerBundle.read(folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    TokenizerBundle.verified(bundle.data, bundle.digest).write(copy)
    assert not (copy / "model.safetensors").exists()
    assert TokenizerBundle.read(copy) == bundle
    text = "hi there <|im_end|>"
    assert TextTokenizer.load(copy).encode(text) == TextTokenizer.load(folder).encode(text)


def test_digest_changes_with_each_file(folder):
    digests = {TokenizerBundle.read(folder).digest}
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_text('{"other": 1}', encoding="utf-8")
        digests.add(TokenizerBundle.read(folder).digest)
    assert len(digests) == 4


def test_missing_or_large_files_are_refused_by_name(folder, monkeypatch):
    (folder / "tokenizer.json").rename(folder / "away")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        TokenizerBundle.read(folder)
    (folder / "away").rename(folder / "tokenizer.json")
    monkeypatch.setattr(bundles, "MAX_BUNDLE_BYTES", (folder / "tokenizer.json").stat().st_size)
    with pytest.raises(CheckpointError, match="more than"):
        TokenizerBundle.read(folder)


def test_tokenizer_parts_join_to_the_bundle_that_was_read(folder, monkeypatch):
    monkeypatch.setattr(bundles, "PART_BYTES", 100)
    bundle = TokenizerBundle.read(folder)
    data = b""
    while True:
        part = tokenizer_part(bundle, TokenizerRequest(digest=bundle.digest, offset=len(data)))
        assert part.offset == len(data)
        data += part.data
        if len(data) >= part.total:
            break
    assert data == bundle.data


@pytest.mark.parametrize("offset", [-1, 10**9, 2**70])
def test_part_outside_the_bundle_is_empty(folder, offset):
    bundle = TokenizerBundle.read(folder)
    part = tokenizer_part(bundle, TokenizerRequest(digest=bundle.digest, offset=offset))
    assert (part.data, part.total) == (b"", len(bundle.data))


def test_unknown_digest_gets_an_empty_part(folder):
    for bundle in (None, TokenizerBundle.read(folder)):
        assert tokenizer_part(bundle, TokenizerRequest(digest="0" * 32)).total == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (msgspec.msgpack.encode({"../escape": b"x", "config.json": b"", "tokenizer.json": b""}), "cannot be read"),
        (msgspec.msgpack.encode({"config.json": b"{}"}), "no tokenizer.json"),
        (msgspec.msgpack.encode({"config.json": 1}), "cannot be read"),
        (b"\xc1", "cannot be read"),
        (b"", "cannot be read"),
    ],
    ids=["name", "missing", "type", "no msgpack", "empty"],
)
def test_received_data_that_are_no_bundle_are_refused(data, reason):
    with pytest.raises(CheckpointError, match=reason):
        TokenizerBundle.verified(data, digest_of(data))


def test_received_data_with_another_digest_are_refused(folder):
    bundle = TokenizerBundle.read(folder)
    with pytest.raises(CheckpointError, match="not the one with digest"):
        TokenizerBundle.verified(bundle.data + b"\0", bundle.digest)
    monstrous = bytes(bundles.MAX_BUNDLE_BYTES + bundles.PART_BYTES + 1)
    with pytest.raises(CheckpointError, match="at most"):
        TokenizerBundle.verified(monstrous, digest_of(monstrous))
