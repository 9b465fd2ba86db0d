"""The paged kernel's work list of a step.

Compiled, and unlike the kernels without letting go of the interpreter lock, as some of numpy's functions do: it runs
at the start of a step, see `forward.borrowed`.
"""

from typing import Any

import numpy as np

from tandem_engine.attention import cpu_kernels
from tandem_engine.attention.cpu_kernels import (
    CHUNK,
    END_TASK,
    FIRST,
    FIRST_TASK,
    LENGTH,
    QUERY,
    ROW,
    TASK_CHUNK,
    TOKEN,
)
from tandem_engine.attention.pieces import Array
from tandem_engine.compiled import compiled

NO_WINDOW = 1 << 62
"""Longer than any sequence."""


def _cut_queries(
    queries: Array, num_short: int, seq_lens: Array, num_extend: int, first_decode: int, window: int
) -> Any:
    """Fill in `queries` [Q, QUERY_COLUMNS] behind the first `num_short`, then cut all of them at multiples of `CHUNK`.

    Args:
        queries: of the first `num_short` only the ranges of tasks are missing.
        seq_lens: [B] int64; those from `num_extend` on decode.
        first_decode: index of the first decode's token.
        window: of decodes.

    Returns the tasks [N, 2], and how many rows of K and of V the queries read together per head.
    """
    for index in range(num_short, queries.shape[0]):
        decode = index - num_short
        length = seq_lens[num_extend + decode]
        queries[index, TOKEN] = first_decode + decode
        queries[index, ROW] = num_extend + decode
        queries[index, LENGTH] = length
        queries[index, FIRST] = max(length - window, 0)
    num_tasks, rows_read = 0, 0
    for index in range(queries.shape[0]):
        first, length = queries[index, FIRST], queries[index, LENGTH]
        queries[index, FIRST_TASK] = num_tasks
        num_tasks += (length + CHUNK - 1) // CHUNK - first // CHUNK
        queries[index, END_TASK] = num_tasks
        rows_read += length - first
    tasks = np.empty((num_tasks, 2), np.int64)
    for index in range(queries.shape[0]):
        first_task = queries[index, FIRST_TASK]
        for task in range(first_task, queries[index, END_TASK]):
            tasks[task, QUERY] = index
            tasks[task, TASK_CHUNK] = queries[index, FIRST] // CHUNK + task - first_task
    return tasks, rows_read


cut_queries = compiled(_cut_queries, nogil=False, made_of=[cpu_kernels])
