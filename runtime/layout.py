"""Layouts: a region of the grid and its map to the packed rows that it uses.

Legend: M region positions, H distinct packed rows used, K region positions that are not dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treecompile.runtime.trajectories import Array

__all__ = ["Layout", "make_layout"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The map of a region to packed rows, both ways; all arrays int64.

    rows: [H] packed tokens used, ascending.
    row_index: [M] index into rows, -1 where the position is dropped.
    offsets: [H + 1], positions: [K]: CSR of the expand adjoint. The region positions that map to local row h are
        ``positions[offsets[h] : offsets[h + 1]]``, ascending.
    """

    rows: Array
    row_index: Array
    offsets: Array
    positions: Array


def make_layout(packed: Array, n: int) -> Layout:
    """Layout of a region whose positions map to packed tokens [M] (-1 dropped) of a tree of n. O(M + n)."""
    kept = packed >= 0
    used = np.zeros(n, np.bool_)
    used[packed[kept]] = True
    rows = np.flatnonzero(used)
    local = np.cumsum(used) - 1
    row_index = np.full(len(packed), -1, np.int64)
    row_index[kept] = local[packed[kept]]
    counts = np.bincount(row_index[kept], minlength=len(rows))
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    # Dropped positions (-1) sort first and fall away.
    positions = np.argsort(row_index, kind="stable")[len(packed) - int(kept.sum()) :]
    return Layout(rows, row_index, offsets, positions)
