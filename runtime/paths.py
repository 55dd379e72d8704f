"""Packed tokens along every trajectory, in run-length form.

A path is a few contiguous ranges of packed tokens, because the largest child follows its parent directly:
at most log2(N) of them, often one or two. Row indices and layouts are written range by range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treecompile.runtime.segments import Segments
from treecompile.runtime.stretches import Array, Stretches, fragmented, ramps
from treecompile.runtime.trajectories import Trajectories

__all__ = ["Ranges", "path_ranges"]


@dataclass(frozen=True)
class Ranges:
    """Grid stretches in ascending order, and the packed token [R] of the first position of each.

    Position ``where.start[r] + j`` maps to packed token ``token[r] + j``.
    """

    where: Stretches
    token: Array

    def packed(self, positions: Array) -> Array:
        """Packed tokens of flat grid positions that lie in a range; -1 stays -1."""
        if len(self.token) == 0:
            return np.full(len(positions), -1, np.int64)
        r = np.maximum(np.searchsorted(self.where.start, positions, side="right") - 1, 0)
        return np.where(positions >= 0, self.token[r] + positions - self.where.start[r], -1)

    def write(self, size: int, dtype: np.dtype[Any]) -> Array:
        """[size] packed token of every flat grid position, -1 outside the ranges. O(size)."""
        start, length = self.where.start, self.where.length
        if fragmented(length):
            flat: Array = np.full(size, -1, dtype)
            flat[self.where.index()] = ramps(self.token, length, dtype)
            return flat
        flat, free = np.empty(size, dtype), 0
        ramp = np.arange(int(length.max(initial=0)), dtype=dtype)
        for begin, count, token in zip(start.tolist(), length.tolist(), self.token.tolist(), strict=True):
            if free < begin:
                flat[free:begin] = -1
            free = begin + count
            np.add(ramp[:count], token, out=flat[begin:free])
        flat[free:] = -1
        return flat


def path_ranges(table: Segments, rows: Trajectories, last: Array) -> Ranges:
    """The ranges of all trajectories; ``last`` [I] is the packed token at which each ends. O(I log N + S)."""
    start, depth, parent = table.start.tolist(), table.depth.tolist(), table.parent.tolist()
    end = (table.start + table.length).tolist()
    head = list(range(len(start)))  # the topmost segment of the contiguous range that a segment belongs to
    for s, p in enumerate(parent):
        if p >= 0 and start[s] == end[p]:
            head[s] = head[p]
    segment = (np.searchsorted(table.start, last, side="right") - 1).tolist()
    begins, tokens, counts = [], [], []
    for begin, n, s in zip(rows.start.tolist(), last.tolist(), segment, strict=True):
        while s >= 0:
            top = head[s]
            begins.append(begin + depth[top])
            tokens.append(start[top])
            counts.append(n + 1 - start[top])
            s = parent[top]
            n = end[s] - 1
    where = Stretches(np.array(begins, np.int64), np.array(counts, np.int64))
    token = np.array(tokens, np.int64)
    if rows.source is not None:
        origin, (where, piece) = where, rows.source.slices(where.start, where.length)
        before = np.cumsum(where.length) - where.length
        token = token[piece] + before - origin.offset[piece]
    order = np.argsort(where.start, kind="stable")
    return Ranges(Stretches(where.start[order], where.length[order]), token[order])
