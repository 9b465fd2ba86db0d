"""Lines of JSON between the one that measures and a process in a peer's environment. Standard library alone.

    →  what to load                       once
    ←  {"ready": …}                       once: versions and other facts
    →  [[prompt, output_len], …]          for each batch
    ←  {"seconds": …, "outputs": [[…]]}   by the clock of the process that generated

A library may print; its standard output is the log.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Batch = Sequence[tuple[list[int], int]]
Generate = Callable[[Batch], list[list[int]]]


def serve(load: Callable[[dict[str, Any]], tuple[Generate, Callable[[], dict[str, Any]]]]) -> None:
    """Answer until standard input ends. `load` gives what generates and what tells facts."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(message: object) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    generate, facts = load(json.loads(sys.stdin.buffer.readline()))
    reply({"ready": facts()})
    for line in sys.stdin.buffer:
        batch = json.loads(line)
        if batch == "facts":
            reply(facts())
            continue
        began = time.perf_counter()
        outputs = generate([(prompt, length) for prompt, length in batch])
        reply({"seconds": time.perf_counter() - began, "outputs": [list(each) for each in outputs]})
