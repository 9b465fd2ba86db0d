"""Traces are read as published; what cannot be read is named by its line."""

import json

import pytest

from tandem_engine.base.errors import ConfigError
from tandem_lab.traces import MAX_CHOICES, read_trace
from tandem_services.gateway import limits

GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_line_gives_seconds_lengths_and_blocks(tmp_path):
    (row,) = read_trace(write(tmp_path, "t.jsonl", json.dumps(GOOD) + "\n\n"))
    assert (row.at, row.prompt_tokens, row.output_tokens, row.blocks) == (1.5, 600, 7, (3, 4))


def test_azure_trace_prompts_have_distinct_blocks(tmp_path):
    text = AZURE + "2023-11-16 18:15:46.6805900,1025,44\n2023-11-16 18:15:47.6805900,512,1\n"
    first, second = read_trace(write(tmp_path, "t.csv", text))
    assert first.blocks == (0, 1, 2)
    assert second.blocks == (3,)
    assert second.at - first.at == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_length": 0}, "input_length"),
        ({"input_length": "many"}, "input_length"),
        ({"output_length": -1}, "output_length"),
        ({"timestamp": -1}, "timestamp"),
        ({"hash_ids": [3]}, "hash_ids has 1 blocks, but 600 tokens of input_length are 2 of 512"),
        ({"hash_ids": [3, -4]}, "hash_ids"),
        ({"tenant": "no name"}, "tenant"),
        ({"priority": 1001}, "priority"),
        ({"n": 0}, "$.n"),
        ({"n": MAX_CHOICES + 1}, "$.n"),
        ({"n": "two"}, "$.n"),
    ],
)
def test_bad_mooncake_line_is_named_with_its_number_and_field(tmp_path, change, reason):
    path = write(tmp_path, "t.jsonl", json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl line 2: ") as error:
        list(read_trace(path))
    assert reason in str(error.value)


def test_mooncake_line_may_name_a_tenant_and_a_priority(tmp_path):
    lines = [GOOD, GOOD | {"tenant": "search", "priority": -5}]
    rows = list(read_trace(write(tmp_path, "t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))))
    assert [(row.tenant, row.priority) for row in rows] == [("", 0), ("search", -5)]


def test_mooncake_line_may_have_as_many_choices_as_gateways_take(tmp_path):
    assert MAX_CHOICES == limits.MAX_CHOICES
    lines = [GOOD, GOOD | {"n": MAX_CHOICES}]
    rows = list(read_trace(write(tmp_path, "t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))))
    assert [row.choices for row in rows] == [1, MAX_CHOICES]


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 1}', '"text"'])
def test_invalid_trace_line_is_named(tmp_path, line):
    with pytest.raises(ConfigError, match=r"line 1: "):
        list(read_trace(write(tmp_path, "t.jsonl", line)))


@pytest.mark.parametrize(
    "line",
    ["yesterday,10,10", "2023-11-16 18:15:46.6805900,ten,10", "2023-11-16 18:15:46.6805900,10,0", "only"],
)
def test_bad_azure_line_is_named_with_its_number(tmp_path, line):
    path = write(tmp_path, "t.csv", AZURE + "2023-11-16 18:15:46.6805900,10,10\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"t\.csv line 3: "):
        list(read_trace(path))


def test_other_columns_files_and_bytes_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"line 1: the columns must be TIMESTAMP"):
        list(read_trace(write(tmp_path, "t.csv", "a,b\n1,2\n")))
    with pytest.raises(ConfigError, match=r"must end in \.jsonl"):
        list(read_trace(tmp_path / "t.txt"))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "absent.jsonl"))
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        list(read_trace(binary))
