"""Messages of two releases: what an earlier one has written is read whole, and what a later one adds is ignored."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_engine.base.errors import WireError
from tandem_engine.base.release import RELEASE, WINDOW, skew
from tandem_engine.messages.codec import Codec
from tandem_engine.messages.control import EngineToWorker, WorkerToEngine
from tandem_engine.messages.kv_events import KvEvent
from tandem_engine.messages.nodes import LeaderToNode, NodeToLeader
from tandem_engine.messages.outputs import EngineReply
from tandem_engine.messages.requests import EngineRequest
from tandem_engine.messages.transfer import PeerMessage
from tandem_testing.each_case import check_each
from tandem_testing.wire_samples import encoded_samples, files, sample, structs

FILES = dict(files())
Written = tuple[int, str, bytes]
WRITTEN: list[Written] = [(release, name, data) for release, samples in FILES.items() for name, data in samples.items()]
UNIONS: tuple[object, ...] = (
    *(EngineRequest, EngineReply, EngineToWorker, WorkerToEngine),
    *(PeerMessage, NodeToLeader, LeaderToNode, KvEvent),
)
CHANNELS: list[Codec[Any]] = [*map(Codec, UNIONS)]
LATER = "field_of_a_later_release"


def missing_from(written: Any, read: Any, path: str = "") -> list[str]:
    """Values of `written`, by path, that `read` lacks."""
    if isinstance(written, dict) and isinstance(read, dict):
        lost = [f"{path}.{key}" for key in written if key not in read]
        return lost + [
            each
            for key in written.keys() & read.keys()
            for each in missing_from(written[key], read[key], f"{path}.{key}")
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) <= len(read):
        return [
            each for index, item in enumerate(written) for each in missing_from(item, read[index], f"{path}[{index}]")
        ]
    return [] if written == read else [f"{path} {written!r} -> {read!r}"]


def with_later_fields(value: Any) -> Any:
    """`value`, as msgpack has it, with one more field in every map."""
    if isinstance(value, dict):
        return {**{key: with_later_fields(item) for key, item in value.items()}, LATER: "x"}
    return [*map(with_later_fields, value)] if isinstance(value, list) else value


def without_later_fields(value: Any) -> Any:
    """For a field of any names, which keeps that one."""
    if isinstance(value, dict):
        return {key: without_later_fields(item) for key, item in value.items() if key != LATER}
    return [*map(without_later_fields, value)] if isinstance(value, list) else value


def reads(channel: Codec[Any], data: bytes) -> bool:
    try:
        channel.decode(data)
    except WireError:
        return False
    return True


def plain(message: msgspec.Struct) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def test_message_of_a_release_is_read_whole() -> None:
    check_each(WRITTEN, is_read_whole, name=written_name)


def written_name(written: Written) -> str:
    return f"{written[0]}-{written[1]}"


def is_read_whole(written: Written) -> None:
    release, name, data = written
    assert name in structs(), f"release {release} sends {name}: keep it until that release is outside the window"
    read = msgspec.msgpack.decode(data, type=structs()[name])
    assert missing_from(msgspec.msgpack.decode(data), plain(read)) == []


def test_tagged_message_of_a_release_has_a_channel() -> None:
    check_each(WRITTEN, has_a_channel, name=written_name)


def has_a_channel(written: Written) -> None:
    release, name, data = written
    if structs()[name].__struct_config__.tag is not None:
        assert any(reads(channel, b"\x01" + data) for channel in CHANNELS), f"nothing reads {name} of release {release}"


def test_message_with_later_fields_is_read() -> None:
    check_each(structs(), is_read_with_later_fields, name=str)


def is_read_with_later_fields(name: str) -> None:
    expected = sample(structs()[name])
    later = msgspec.msgpack.encode(with_later_fields(plain(expected)))
    assert without_later_fields(plain(msgspec.msgpack.decode(later, type=structs()[name]))) == plain(expected)


@pytest.mark.parametrize("name", [name for name, struct in structs().items() if struct.__struct_config__.array_like])
def test_array_with_later_items_is_read(name: str) -> None:
    expected = sample(structs()[name])
    later = msgspec.msgpack.encode([*plain(expected), "x"])
    assert msgspec.msgpack.decode(later, type=structs()[name]) == expected


def test_file_of_this_release_has_every_struct() -> None:
    assert FILES[RELEASE] == encoded_samples(), "python -m tandem_testing.wire_samples writes the file of this release"


def test_every_release_of_the_window_has_a_file() -> None:
    assert set(FILES) >= set(range(max(0, RELEASE - WINDOW), RELEASE + 1))


@pytest.mark.parametrize("release", range(RELEASE - WINDOW, RELEASE + WINDOW + 1))
def test_release_of_the_window_is_no_skew(release: int) -> None:
    assert skew(release) == ""


@pytest.mark.parametrize("release", [RELEASE - WINDOW - 1, RELEASE + WINDOW + 1])
def test_skew_names_both_releases(release: int) -> None:
    assert f"release {release}," in skew(release)
    assert f"release {RELEASE}:" in skew(release)


def test_release_is_the_minor_version() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"].split(".")[:2] == ["0", str(RELEASE)]
