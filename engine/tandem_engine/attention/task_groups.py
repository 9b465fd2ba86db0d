"""Which tasks of the paged kernel are computed together: those that read the same pages.

Requests with a common prefix have the same pages for it, as have a token and the drafts behind it. One after the other
they would each bring these pages from memory again. A group of them goes through the pages once, tile by tile, until
their pages part; then each goes on alone. What is computed for a member is the same, operation for operation, as if it
were alone.

A page has one place in any sequence, so members are found by the first page of their chunk. How far they go together is
seen by comparing pages.

Compiled as `cpu_queries` is, without letting go of the interpreter lock.
"""

from typing import Any

import numpy as np

from tandem_engine.attention import cpu_kernels
from tandem_engine.attention.cpu_kernels import CHUNK, FIRST, LENGTH, QUERY, ROW, TASK_CHUNK
from tandem_engine.attention.pieces import Array
from tandem_engine.compiled import compiled

FIRST_MEMBER, END_MEMBER, SHARED_END = range(3)
"""Columns of `groups`: a half-open range of `members`, and the position up to which they read the same pages, which
is 0 of a task that is alone."""

GROUP_COLUMNS = 3

LARGEST_GROUP = 8
"""Members whose queries and outputs stay in a core's second cache beside a tile."""
GROUPS_PER_THREAD = 2
"""So many at least of tasks that could be one group, for all threads to have some."""


def _shared_end(some: Array, others: Array, begin: int, limit: int, page_size: int, tile: int) -> int:
    """Up to where two rows of the page table are the same from `begin` on: the end of a tile, or of a chunk."""
    first = begin // page_size
    index = first
    while index * page_size < limit and some[index] == others[index]:
        index += 1
    same = min(index * page_size, limit)
    if same < begin + CHUNK:
        same = first * page_size + (same - first * page_size) // tile * tile
    return max(same, begin)


def _listed(group_of: Array, sizes: Array, ends: Array) -> tuple[Array, Array]:
    """`groups` and `members` of the number of each task's group, and of groups' sizes and shared ends."""
    groups = np.empty((sizes.shape[0], GROUP_COLUMNS), np.int64)
    members = np.empty(group_of.shape[0], np.int64)
    places = np.empty(sizes.shape[0], np.int64)
    index, place = 0, 0
    for alone in (False, True):
        for group in range(sizes.shape[0]):
            if (sizes[group] == 1) == alone:
                groups[index, FIRST_MEMBER], groups[index, END_MEMBER] = place, place + sizes[group]
                groups[index, SHARED_END] = 0 if alone else ends[group]
                places[group] = place
                place += sizes[group]
                index += 1
    for task in range(group_of.shape[0]):
        members[places[group_of[task]]] = task
        places[group_of[task]] += 1
    return groups, members


shared_end = compiled(_shared_end, nogil=False, made_of=[cpu_kernels])
listed = compiled(_listed, nogil=False)


def _group_tasks(tasks: Array, queries: Array, page_table: Array, page_size: int, tile: int, threads: int) -> Any:
    """Groups of tasks, those of several first.

    Args:
        tasks, queries, page_table: as `paged_kernel.ATTEND` has them.
        tile: tokens between two updates of the softmax, whole pages: where members may part.
        threads: that should have groups to compute.

    Returns `groups` [G, GROUP_COLUMNS] int64 and `members` [N] int64, every task once.
    """
    count = tasks.shape[0]
    largest = LARGEST_GROUP if threads == 1 else min(LARGEST_GROUP, count // (GROUPS_PER_THREAD * threads))
    slots = 2 * count + 1
    newest = np.full(slots, -1, np.int64)  # group by the hash of its first page
    pages, leaders, sizes = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    ends, group_of = np.empty(count, np.int64), np.empty(count, np.int64)
    num_groups = 0
    for task in range(count):
        query, chunk = queries[tasks[task, QUERY]], tasks[task, TASK_CHUNK]
        begin = chunk * CHUNK
        page_row = page_table[query[ROW]]
        page = page_row[begin // page_size]
        stop = min(begin + CHUNK, query[LENGTH]) if query[FIRST] <= begin else begin
        slot = page % slots
        while newest[slot] >= 0 and pages[newest[slot]] != page:
            slot = (slot + 1) % slots
        group, end = newest[slot], begin
        if group >= 0 and sizes[group] < largest and tasks[leaders[group], TASK_CHUNK] == chunk:
            other_row = page_table[queries[tasks[leaders[group], QUERY], ROW]]
            end = shared_end(page_row, other_row, begin, min(ends[group], stop), page_size, tile)
        # Whoever parts so early that the others would have to go alone for most of their way does not join them.
        if end > begin and 2 * (end - begin) >= ends[group] - begin:
            sizes[group] += 1
            ends[group] = end
        else:
            group = num_groups
            pages[group], leaders[group], sizes[group], ends[group] = page, task, 1, stop
            if stop > begin:  # whoever nobody can join does not stand before a group that others can
                newest[slot] = group
            num_groups += 1
        group_of[task] = group
    return listed(group_of, sizes[:num_groups], ends)


group_tasks = compiled(_group_tasks, nogil=False, made_of=[cpu_kernels])
