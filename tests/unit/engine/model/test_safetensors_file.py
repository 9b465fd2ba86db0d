"""Headers of safetensors files are believed in nothing."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from tandem_engine.base.errors import CheckpointError
from tandem_engine.model import checkpoint_files
from tandem_engine.model.checkpoint_files import read_header
from tandem_testing.checkpoint_files import write_raw_safetensors


def entry(begin: int, end: int, *, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_bit_for_bit(path, dtype):
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "empty": torch.empty(0, 2, dtype=dtype)}
    save_file(tensors, path, metadata={"format": "pt"})
    stored = read_header(path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name].read(), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_part_of_any_dimension_is_read_bit_for_bit(path, dtype):
    tensor = torch.randn(4, 6, 5).to(dtype)
    save_file({"before": torch.randn(3), "a": tensor}, path)
    stored = read_header(path)["a"]
    for dim, start, stop in ((0, 1, 3), (0, 0, 4), (1, 2, 6), (1, 5, 5), (2, 0, 2), (2, 4, 5)):
        assert torch.equal(stored.read_part(dim, start, stop), tensor.narrow(dim, start, stop - start))


def test_part_beyond_the_end_of_a_truncated_file_is_an_error(path):
    save_file({"a": torch.randn(8, 8)}, path)
    stored = read_header(path)["a"]
    os.truncate(path, path.stat().st_size - 100)
    assert stored.read_part(0, 0, 4).shape == (4, 8)
    with pytest.raises(CheckpointError, match="was truncated while tensor"):
        stored.read_part(1, 4, 8)


@pytest.mark.parametrize("content", [b"", b"\x02\x00\x00"])
def test_empty_or_cut_file_is_refused(path, content):
    path.write_bytes(content)
    assert "empty or truncated" in refusal(path)


@pytest.mark.parametrize("length", [1000, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused(path, length):
    write_raw_safetensors(path, {}, b"", header_length=length)
    assert f"claims {length} bytes" in refusal(path)


def test_huge_header_is_refused_without_reading_it(path):
    write_raw_safetensors(path, b"", b"", header_length=100_000_001)
    os.truncate(path, 100_000_100)  # sparse: takes no space
    assert "exceeds the bound" in refusal(path)


@pytest.mark.parametrize(
    "header", [b"not json", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1' + b"0" * 5000]
)
def test_header_that_is_not_json_is_refused(path, header):
    write_raw_safetensors(path, header, b"")
    assert "not valid JSON" in refusal(path)


@pytest.mark.parametrize("header", [[], "text", 5])
def test_header_that_is_no_object_is_refused(path, header):
    write_raw_safetensors(path, header, b"")
    assert "JSON object" in refusal(path)


def test_name_that_stands_twice_is_refused(path):
    one = json.dumps(entry(0, 8))
    write_raw_safetensors(path, f'{{"twin": {one}, "twin": {one}}}'.encode(), bytes(8))
    assert "'twin' stands twice" in refusal(path)


BROKEN = {
    "no object": (5, "must be described by an object"),
    "unknown dtype": (entry(0, 8, dtype="Q4_K"), "dtype 'Q4_K'"),
    "quantised dtype": (entry(0, 8, dtype="F8_E5M2"), "dtype 'F8_E5M2'"),
    "dtype no text": (entry(0, 8, dtype=["F32"]), "dtype ['F32']"),
    "no dtype": ({"shape": [2], "data_offsets": [0, 8]}, "dtype None"),
    "no shape": ({"dtype": "F32", "data_offsets": [0, 8]}, "shape None"),
    "no offsets": ({"dtype": "F32", "shape": [2]}, "data_offsets None"),
    "negative shape": (entry(0, 8, shape=[-2]), "shape [-2]"),
    "fractional shape": (entry(0, 8, shape=[2.0]), "shape [2.0]"),
    "boolean shape": (entry(0, 8, shape=[True, 2]), "shape [True, 2]"),
    "too many dimensions": (entry(0, 8, shape=[1] * 9), "at most 8"),
    "size differs from shape": (entry(0, 8, shape=[3]), "needs 12 bytes but has 8"),
    "shape overflows 64 bits": (entry(0, 8, shape=[2**62, 2**62]), "bytes but has 8"),
    "shape overflows to the right size": (entry(0, 8, shape=[2**32 + 2, 2**32]), "bytes but has 8"),
    "offsets past the end": (entry(0, 800), "ends at byte 800 of 8 bytes"),
    "offsets reversed": (entry(8, 0, shape=[2]), "an end after it"),
    "offsets not a pair": ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}, "data_offsets"),
    "offsets huge": (entry(0, 2**80, shape=[2]), "data_offsets"),
}


@pytest.mark.parametrize(("description", "error_message"), BROKEN.values(), ids=BROKEN)
def test_broken_entry_is_refused_by_name(path, description, error_message):
    write_raw_safetensors(path, {"layer.weight": description}, bytes(8))
    message = refusal(path)
    assert "'layer.weight'" in message
    assert error_message in message


def test_overlapping_tensors_are_refused(path):
    write_raw_safetensors(path, {"a": entry(0, 12), "b": entry(8, 16)}, bytes(16))
    assert "'b' overlaps 'a'" in refusal(path)


def test_bytes_that_belong_to_no_tensor_are_refused(path):
    write_raw_safetensors(path, {"a": entry(0, 4), "b": entry(8, 16)}, bytes(16))
    assert "'b' leaves 4 unused bytes" in refusal(path)
    write_raw_safetensors(path, {"a": entry(0, 4)}, bytes(16))
    assert "12 bytes that belong to no tensor" in refusal(path)


def test_file_cut_short_is_refused_before_anything_is_read(path):
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, path)
    os.truncate(path, path.stat().st_size - 4)
    assert "'b' ends at byte 800 of 796" in refusal(path)


def test_claims_of_terabytes_allocate_nothing(path, monkeypatch):
    def no_allocation(*args, **kwargs):
        raise AssertionError("allocated before the checks were over")

    monkeypatch.setattr(checkpoint_files.torch, "empty", no_allocation)
    write_raw_safetensors(path, {"a": entry(0, 1 << 45)}, b"")
    assert "'a'" in refusal(path)


def test_file_truncated_after_the_checks_is_an_error_not_a_crash(path):
    save_file({"a": torch.ones(100_000)}, path)
    stored = read_header(path)["a"]
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="truncated while tensor 'a'"):
        stored.read()


def test_file_removed_after_the_checks_is_a_checkpoint_error(path):
    save_file({"a": torch.ones(10)}, path)
    stored = read_header(path)["a"]
    path.unlink()
    with pytest.raises(CheckpointError, match="tensor 'a' cannot be read"):
        stored.read()


def test_file_changed_after_reading_does_not_change_the_tensor(path):
    save_file({"a": torch.ones(1000)}, path)
    tensor = read_header(path)["a"].read()
    with path.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(4000))
    assert torch.equal(tensor, torch.ones(1000))


def test_hostile_names_do_not_flood_the_message(path):
    write_raw_safetensors(path, {"x" * 1_000_000: entry(0, 800)}, bytes(8))
    assert len(refusal(path)) < 1000
