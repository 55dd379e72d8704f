"""Slow twins of the chunk plan: every row on its own grid, and a search over everything that could have run."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.strategies import Case

Block = tuple[int, ...]
Cost = tuple[int, int, int]


def trajectories(case: Case, row_index: np.ndarray) -> list[list[int]]:
    """Packed tokens of every (row, document), kept positions only."""
    batch, length = case.shape
    visible = np.ones(case.shape, bool) if case.visible is None else case.visible
    documents = np.zeros(case.shape, int) if case.documents is None else case.documents
    out = []
    for b in range(batch):
        for document in np.unique(documents[b]):
            kept = [t for t in range(length) if visible[b, t] and documents[b, t] == document]
            if kept:
                out.append([int(row_index[b, t]) for t in kept])
    return out


@dataclass(frozen=True)
class Twin:
    """blocks: token tuples in order of (last token). parent, owner: by tuple, by token. dense, replay: counts."""

    blocks: list[Block]
    parent: dict[Block, Block | None]
    owner: dict[int, Block]
    dense: int
    replayed: int
    replayed_before: int


def build(rows: list[list[int]], chunk: int, branch: bool = False, row_states: bool = False) -> Twin:
    children: dict[int, set[int]] = {}
    for row in rows:
        for above, token in zip([-1, *row], row, strict=False):
            children.setdefault(above, set()).add(token)
    above_of: dict[Block, int] = {}
    dense = 0
    for row in rows:
        dense += -(-len(row) // chunk)
        begin = 0
        for i in range(1, len(row) + 1):
            fork = branch and i < len(row) and len(children[row[i - 1]]) > 1
            if i == len(row) or i - begin == chunk or fork:
                above_of[tuple(row[begin:i])] = row[begin - 1] if begin else -1
                begin = i
    tokens = {token for row in rows for token in row}
    distinct = list(above_of)
    prefixes = {block[:i] for block in distinct for i in range(1, len(block))}
    kept = [block for block in distinct if row_states or block not in prefixes]
    kept.sort(key=lambda block: block[-1])
    ends = {block[-1]: block for block in kept}
    owner: dict[int, Block] = {}
    for block in kept:
        for token in block:
            owner.setdefault(token, block)
    return Twin(
        kept,
        {block: ends[above_of[block]] if above_of[block] >= 0 else None for block in kept},
        owner,
        dense,
        sum(map(len, kept)) - len(tokens),
        sum(map(len, distinct)) - len(tokens),
    )


def forests(count: int) -> Iterator[list[int]]:
    """Parents, in preorder, of every rooted forest of that many nodes, each shape once."""
    seen = set()

    def shape(parent: Sequence[int], node: int) -> tuple[object, ...]:
        return tuple(sorted(shape(parent, c) for c in range(len(parent)) if parent[c] == node))

    def grow(parent: list[int]) -> Iterator[list[int]]:
        if len(parent) == count:
            key = shape(parent, -1)
            if key not in seen:
                seen.add(key)
                yield parent
            return
        # Preorder: the next node hangs below the last one or one of its ancestors.
        above = len(parent) - 1
        while True:
            yield from grow([*parent, above])
            if above < 0:
                return
            above = parent[above]

    yield from grow([])


def after(parent: Sequence[int]) -> list[int]:
    """One past the subtree of each node in preorder."""
    out = list(range(1, len(parent) + 1))
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            out[parent[node]] = max(out[parent[node]], out[node])
    return out


def best(parent: Sequence[int], boundary: bool, stops: Sequence[bool] | None = None) -> Cost:
    """The least (rounds, sum over rounds of the longest sequence, handoffs), over all executed sets."""
    count = len(parent)
    children = [[c for c in range(count) if parent[c] == n] for n in range(count)]
    closed = [
        s
        for s in range(1 << count)
        if all(not s >> n & 1 or parent[n] < 0 or s >> parent[n] & 1 for n in range(count))
    ]

    def call(before: int, now: int) -> Cost | None:
        """Cost of running now \\ before in one call; None if that is no call."""
        fresh = now & ~before
        length = [0] * count
        handoffs = 0
        for n in range(count):
            if fresh >> n & 1:
                together = [c for c in children[n] if fresh >> c & 1]
                stop = not boundary and (len(children[n]) > 1 or (stops is not None and stops[n]))
                if len(together) > 1 or (together and stop):
                    return None
                length[n] = 1 + (length[parent[n]] if parent[n] >= 0 and fresh >> parent[n] & 1 else 0)
                handoffs += len(together) < len(children[n])
        return 1, max(length), handoffs

    everything = (1 << count) - 1
    costs: dict[int, Cost] = {0: (0, 0, 0)}
    queue: list[tuple[Cost, int]] = [((0, 0, 0), 0)]
    while queue:
        cost, done = heapq.heappop(queue)
        if done == everything:
            return cost
        if cost > costs[done]:
            continue
        for now in closed:
            if now != done and now & done == done:
                step = call(done, now)
                if step is not None:
                    total = (cost[0] + step[0], cost[1] + step[1], cost[2] + step[2])
                    if now not in costs or total < costs[now]:
                        costs[now] = total
                        heapq.heappush(queue, (total, now))
    raise AssertionError("the full set is always reached")
