"""Two threads need a decoder of the same type for the first time, at the same moment."""

import subprocess
import sys

import msgspec

from tandem_engine.messages.codec import msgpack_decoder

RACE = """
import dataclasses, sys, threading
import msgspec
from tandem_engine.messages.codec import msgpack_decoder

sys.setswitchinterval(1e-6)
for turn in range(200):
    inner = [dataclasses.make_dataclass(f"Inner{turn}_{n}", [(f"x{k}", int) for k in range(4)]) for n in range(6)]
    outer = dataclasses.make_dataclass(f"Outer{turn}", [(f"f{n}", tuple[kind, ...]) for n, kind in enumerate(inner)])
    data = msgspec.msgpack.encode({f"f{n}": [{f"x{k}": 1 for k in range(4)}] for n in range(6)})
    start = threading.Barrier(2)

    def decode():
        start.wait()
        for _ in range(3):
            msgpack_decoder(outer).decode(data)

    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_type_that_two_threads_use_first_is_decoded():
    assert subprocess.run([sys.executable, "-c", RACE], check=False).returncode == 0


def test_type_has_one_decoder():
    class Message(msgspec.Struct):
        number: int

    assert msgpack_decoder(Message) is msgpack_decoder(Message)
    assert msgpack_decoder(Message).decode(msgspec.msgpack.encode({"number": 3})) == Message(3)
