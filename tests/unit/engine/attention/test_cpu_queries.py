"""The work list of a step: every token that a query sees is in exactly one of its tasks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_engine.kernels.cpu.attention_work import (
    CHUNK,
    END_TASK,
    FIRST,
    FIRST_TASK,
    LENGTH,
    NO_WINDOW,
    QUERY,
    QUERY_COLUMNS,
    ROW,
    TASK_CHUNK,
    TOKEN,
    cut_queries,
)

lengths = st.integers(1, 3 * CHUNK + 5)
extends = st.lists(lengths, max_size=3)
decodes = st.lists(lengths, max_size=6)
windows = st.one_of(st.just(NO_WINDOW), st.integers(1, 2 * CHUNK))


@settings(deadline=None)
@given(extends=extends, decodes=decodes, window=windows)
def test_every_token_in_sight_is_in_one_task(extends, decodes, window):
    queries = np.full((len(extends) + len(decodes), QUERY_COLUMNS), -1, np.int64)
    for index, length in enumerate(extends):
        queries[index, : LENGTH + 1] = (index, index, length // 3, length)
    seq_lens = np.array([*extends, *decodes], np.int64)
    tasks, rows_read = cut_queries(queries, len(extends), seq_lens, len(extends), 100, window)
    seen: list[list[int]] = [[] for _ in queries]
    for query, chunk in tasks[:, [QUERY, TASK_CHUNK]].tolist():
        first, length = queries[query, FIRST], queries[query, LENGTH]
        seen[query] += range(max(chunk * CHUNK, first), min((chunk + 1) * CHUNK, length))
    assert seen == [list(range(query[FIRST], query[LENGTH])) for query in queries]
    assert rows_read == sum(map(len, seen))
    ranges = [range(query[FIRST_TASK], query[END_TASK]) for query in queries]
    assert [task for tasks_of in ranges for task in tasks_of] == list(range(len(tasks)))
    assert all(tasks[list(tasks_of), QUERY].tolist() == [i] * len(tasks_of) for i, tasks_of in enumerate(ranges))


@settings(deadline=None)
@given(num_extend=st.integers(0, 3), decodes=decodes, window=windows)
def test_decodes_follow_the_extends(num_extend, decodes, window):
    queries = np.empty((len(decodes), QUERY_COLUMNS), np.int64)
    seq_lens = np.array([1] * num_extend + decodes, np.int64)
    cut_queries(queries, 0, seq_lens, num_extend, 50, window)
    assert queries[:, TOKEN].tolist() == [50 + i for i in range(len(decodes))]
    assert queries[:, ROW].tolist() == [num_extend + i for i in range(len(decodes))]
    assert queries[:, LENGTH].tolist() == decodes
    assert queries[:, FIRST].tolist() == [max(length - window, 0) for length in decodes]
